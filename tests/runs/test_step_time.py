"""The initial step time: the same in progress lines, in tables, and after a resume."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gaugelasso.cli.display import show_progress
from gaugelasso.report.data import load_run
from gaugelasso.report.tables import before_after
from gaugelasso.runs.step_time import initial_step_ms
from gaugelasso.training.records import Progress
from tests.report.folders import make_run


def row(step_ms: float | None, fma: float = 1000.0) -> dict[str, Any]:
    return {
        "step": 10, "phase": "compression", "loss": 0.04, "accuracy": 0.5, "fma": fma,
        "parameters": 700, "sites": 12, "operators": 3, "step_ms": step_ms, "wall_s": 0.0,
    }  # fmt: skip


FULL = [row(float(time)) for time in (90, 20, 22, 21, 23)]
CUT = row(5.0, fma=600.0)


@pytest.mark.parametrize(
    ("rows", "going", "finished"),
    [
        ([], None, None),
        (FULL[:2], None, None),  # two rows are too few: one may include the setup
        (FULL, None, 22.0),  # the next row may count, too
        ([*FULL, CUT], 22.0, 22.0),
        ([*FULL[:2], CUT, *FULL], None, None),  # full structure again after a rollback
        ([*FULL, *FULL], 22.0, 22.0),
        ([*FULL, *FULL, row(1.0), row(1.0), row(1.0), CUT], 22.0, 22.0),
        ([*FULL, row(None), row(float("nan")), CUT], 22.0, 22.0),
        ([{"step": 10}, *FULL], None, None),  # without the work, the structure is unknown
    ],
)
def test_the_first_rows_at_the_full_structure(
    rows: list[dict[str, Any]], going: float | None, finished: float | None
) -> None:
    assert initial_step_ms(rows, 1000.0, going=True) == going
    assert initial_step_ms(rows, 1000.0) == finished


def progress_lines(log: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Return what a new display prints as the step time of each row, once the row is in the log."""
    lines = []
    with show_progress(Console(file=(file := io.StringIO())), "title", log) as note:
        for one in rows:
            with log.open("a") as end:
                end.write(json.dumps(one) + "\n")
            note(Progress(one, 10, 0.05, 1000.0, "accuracy", 0.0))
            lines.append(file.getvalue().splitlines()[-1].split("  ")[-2])
    return lines


def test_lines_say_it_once_it_is_known_and_say_it_again_when_a_run_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    assert progress_lines(log, [*FULL, CUT]) == [
        "90.0 ms/step", "20.0 ms/step", "22.0 ms/step", "21.0 ms/step", "23.0 ms/step",
        "5.0 ms/step (from 22.0)",
    ]  # fmt: skip
    assert progress_lines(log, [CUT, FULL[0]]) == [
        "5.0 ms/step (from 22.0)",
        "90.0 ms/step (from 22.0)",
    ]


def test_a_log_that_cannot_be_read_stops_no_run(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text("spoiled\n")
    assert progress_lines(log, [CUT]) == ["5.0 ms/step"]


def test_lines_and_table_agree(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    whole = [{**one, "step": 3 + k} for k, one in enumerate(FULL)]
    rows = [*whole, *load_run(folder).metrics[1:]]
    (folder / "metrics.jsonl").unlink()
    *_, last = progress_lines(folder / "metrics.jsonl", rows)
    assert last == "5.0 ms/step (from 22.0)"
    run = load_run(folder)
    for one in (run, replace(run, summary=None)):
        (cells,) = (cells for cells in before_after([one]).rows if cells[0] == "step time")
        assert cells[1:] == ["22.0 ms", "5.00 ms", "4.40×"]
