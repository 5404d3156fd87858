"""Milliseconds that were measured of a run are shown beside its costs."""

import json
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.errors import UserError
from gaugelasso.report.data import load_run
from gaugelasso.report.pareto import load_points, pareto_table
from gaugelasso.report.served import measured
from gaugelasso.report.tables import before_after, runs_table
from gaugelasso.runs.reading import SERVING
from tests.report.folders import make_run

PASS, ONE = "measured ms (8×16 tokens, CPU)", "measured ms (1×16 tokens, CPU)"


def row(model: str, form: str, latency: float, batch: float, **more: Any) -> dict[str, Any]:
    sizes = {"batch": 8, "length": 16, "decode": False, "device": "cpu"}
    times = {"latency_ms": latency, "batch_ms": batch}
    return {"model": model, "form": form, "at": {"hardware": "CPU"}, **sizes, **times, **more}


ROWS = [
    row("ancestor", "training", 9.0, 90.0),
    row("ancestor", "inference", 4.0, 40.0),
    row("compressed", "inference", 2.0, 10.0),
    row("compressed", "training", 8.0, 80.0),
    row("uniform", "inference", 1.0, 5.0),
]


def serve(run: Path, rows: list[dict[str, Any]]) -> Path:
    (run / SERVING).write_text(json.dumps({"inference": rows}))
    return run


def test_the_inference_form_is_compared_with_that_of_the_ancestor(tmp_path: Path) -> None:
    run = load_run(serve(make_run(tmp_path / "r"), ROWS))
    lines = {line[0]: line[1:] for line in before_after([run]).rows}
    assert lines[PASS] == ["40", "10", "4.00×"]
    assert lines[ONE] == ["4", "2", "2.00×"]
    # A model of one's own has the form of training alone.
    own = load_run(serve(tmp_path / "r", [each for each in ROWS if each["form"] == "training"]))
    assert measured(own)["8×16 tokens, CPU"] == (90.0, 80.0)
    steps = [row("compressed", "inference", 0.5, 3.0, decode=True)]
    assert measured(load_run(serve(tmp_path / "r", steps))) == {
        "a step of 1 at 16, CPU": (None, 0.5), "a step of 8 at 16, CPU": (None, 3.0),
    }  # fmt: skip


def test_runs_that_were_not_measured_have_a_dash(tmp_path: Path) -> None:
    for seed in (1, 2):
        make_run(tmp_path / f"r{seed}", seed=seed)
    serve(tmp_path / "r1", ROWS)
    runs = [load_run(tmp_path / f"r{seed}") for seed in (1, 2)]
    table = runs_table(runs)
    place = table.headers.index(PASS)
    assert [cells[place] for cells in table.rows] == ["10", "—", "—", "—"]

    other = make_run(tmp_path / "other", seed=3, changes={"target": {"loss": 0.5}})
    found = pareto_table(load_points([tmp_path / "r1", other]))
    place = found.headers.index(PASS)
    assert sorted(cells[place] for cells in found.rows) == ["10", "—"]
    assert "Measured: by bench --inference." in found.note


def test_without_measurements_nothing_is_said(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "r"))
    assert run.serving == ()
    assert not [head for head in runs_table([run]).headers if "measured" in head]


@pytest.mark.parametrize(
    "rows", [{}, [3], [{"model": "compressed"}], [row("a", "b", 1.0, 2.0, at=3)]]
)
def test_a_damaged_file_is_named(tmp_path: Path, rows: Any) -> None:
    run = serve(make_run(tmp_path / "r"), rows)
    message = r"serving.json': 'inference' is not a list of rows of bench --inference"
    with pytest.raises(UserError, match=message):
        load_run(run)
