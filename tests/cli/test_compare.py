"""The command `compare`: what it writes, measures and refuses."""

import io
import json
from pathlib import Path

import pytest

from gaugelasso.report.compare_figure import draw_comparison
from tests.command import Command, assert_user_error
from tests.report.test_compare import compared, run_at, two_methods
from tests.tiny_runs import contents, finished


def test_the_command_writes_table_picture_and_results(gaugelasso: Command, tmp_path: Path) -> None:
    runs = two_methods(tmp_path / "runs")
    extra = tmp_path / "results.json"
    code, out, _ = gaugelasso("compare", runs, "--results", extra)
    assert code == 0
    assert "| post-hoc | 4 seeds | 201.5 ± 1.3 |" in out
    folder = runs / "compare"
    assert sorted(path.name for path in folder.iterdir()) == [
        "compare.json", "compare.md", "compare.png",
    ]  # fmt: skip
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "compare.json").read_text() == extra.read_text()
    table = (folder / "compare.md").read_text()
    assert "| post-hoc | 4 seeds |" in table
    assert "those of the runs are in compare.json" in table
    ran = json.loads(extra.read_text())["command"]
    assert ran
    assert ran not in table


def test_a_results_file_is_replaced_only_if_told(gaugelasso: Command, tmp_path: Path) -> None:
    runs = two_methods(tmp_path / "runs", seeds=1)
    summary = runs / "ours" / "s0" / "summary.json"
    before = contents(tmp_path)
    words = ("compare", runs, "--results", summary)
    assert_user_error(gaugelasso(*words), "already exists; add --overwrite to replace it")
    assert contents(tmp_path) == before
    (extra := tmp_path / "results.json").write_text("older")
    assert gaugelasso("compare", runs, "--results", extra, "--overwrite")[0] == 0
    assert len(json.loads(extra.read_text())["runs"]) == 2


@pytest.mark.parametrize("loss", [1e300, 1e-320])
def test_a_loss_beyond_a_picture_is_drawn(gaugelasso: Command, tmp_path: Path, loss: float) -> None:
    """Warnings of the library that draws are errors in tests."""
    runs = [run_at(tmp_path / "a", 100, 0.03), run_at(tmp_path / "b", 90, loss, method="cofi")]
    picture = io.BytesIO()
    draw_comparison(compared(*runs), picture)
    assert picture.getvalue().startswith(b"\x89PNG")
    assert gaugelasso("pareto", *runs, "--out", tmp_path / "pareto")[0] == 0


def test_a_damaged_or_unfinished_run_leaves_nothing(gaugelasso: Command, tmp_path: Path) -> None:
    runs = two_methods(tmp_path / "runs")
    summary = runs / "posthoc" / "s1" / "summary.json"
    before = summary.read_text()
    for text, message in (
        (before[:40], "summary.json"),
        (json.dumps(json.loads(before) | {"fma_final": "x"}), "'fma_final' is not a finite number"),
    ):
        summary.write_text(text)
        kept = contents(tmp_path)
        assert_user_error(gaugelasso("compare", runs), message)
        assert contents(tmp_path) == kept
    summary.unlink()
    assert_user_error(gaugelasso("compare", runs), "is not finished: summary.json is missing")
    assert_user_error(gaugelasso("compare", runs, "--device", "cpu"), "--device is for --latency")
    assert not (runs / "compare").exists()


def test_latency_measures_the_models(gaugelasso: Command, tmp_path: Path) -> None:
    one, other = (finished(tmp_path, name) for name in ("one", "other"))
    path = other / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"method": "post-hoc"}))
    out = tmp_path / "out"
    code, text, _ = gaugelasso(
        "compare", one, other, "--latency", "--repeats", "3", "--device", "cpu", "--out", out
    )
    assert code == 0
    data = json.loads((out / "compare.json").read_text())
    assert all(run["ms"] > 0 for run in data["runs"])
    assert data["latency"]["device"] == "cpu, 1 thread"
    assert "| ms |" in text
    assert "median of 3 on cpu, 1 thread" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--results", "a-folder"], "output 'a-folder' cannot be written: Is a directory"),
        (["--results", "a-file/r.json"], "'a-file/r.json' cannot be written: Not a directory"),
        (["--out", "a-file"], "'a-file/compare.json' cannot be written: Not a directory"),
    ],
    ids=["a folder", "below a file", "out"],
)
def test_files_that_cannot_be_written_are_refused_before_the_measurement(
    gaugelasso: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    two_methods(tmp_path / "runs", seeds=1)
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "a-file").touch()
    before = contents(tmp_path)
    measured: list[object] = []
    monkeypatch.setattr("gaugelasso.cli.comparisons._measure", lambda *_: measured.append(1))
    monkeypatch.chdir(tmp_path)
    assert_user_error(gaugelasso("compare", "runs", "--latency", *options), message)
    assert contents(tmp_path) == before
    assert not measured


def test_a_busy_machine_is_reported(
    gaugelasso: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_methods(tmp_path / "runs", seeds=1)
    row = {"latency_ms": 2.0, "latency_quartiles": [1.0, 9.0]}
    monkeypatch.setattr("gaugelasso.cli.comparisons.run_config", lambda run: None)
    monkeypatch.setattr(
        "gaugelasso.cli.comparisons.latencies", lambda folders, *_: dict.fromkeys(folders, row)
    )
    code, out, _ = gaugelasso("compare", tmp_path / "runs", "--latency", "--device", "cpu")
    assert code == 0
    assert "warning: repetitions disagree" in out
