"""Results files: their shape, and what may not be put into one."""

from pathlib import Path

import pytest

from gaugelasso.errors import UserError
from gaugelasso.report.results import collect_results, results_table
from tests.report.folders import make_run


def test_results_of_a_condition(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"r{seed}", seed=seed) for seed in (3, 1)]
    results = collect_results(folders)
    assert list(results) == ["command", "commit", "hardware", "date", "accounting", "runs"]
    assert results["commit"] == "abc123"  # shared: said once
    assert results["command"].count("gaugelasso train demo.toml") == 2
    assert results["date"] == "2026-01-02T00:00:00+00:00/2026-01-04T00:00:00+00:00"
    assert [run["seed"] for run in results["runs"]] == [1, 3]
    assert results["runs"][0] == {
        "seed": 1,
        "steps": 100,
        "fma_initial": 1000.0,
        "fma_final": 101.0,
        "compression": 1000 / 101,
        "loss": 0.03,
        "metric": 0.9996,
        "wall_s": 12.5,
        "structure": {
            "layers": 2,
            "operators": [{"kind": "attention", "depth": 0, "heads": 4, "kv_heads": 2}],
        },
    }


def test_results_as_a_markdown_table(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"r{seed}", seed=seed) for seed in (0, 10, 20)]
    lines = results_table(collect_results(folders), "retrieval").splitlines()
    assert lines[0] == "### retrieval"
    assert lines[4] == "| 0 | 100 | 1,000 | 100 | 10.0× | 0.03 | 0.9996 | 12.5 s |"
    assert lines[7].startswith("| mean ± std | 100 | 1,000 | 110 ± 10 | 9.14× ± 0.83× |")
    assert "Accounting: fma. CPU, 2 cores" in lines[-1]


def test_one_run_needs_no_mean(tmp_path: Path) -> None:
    table = results_table(collect_results([make_run(tmp_path / "r")]), "one")
    assert "mean" not in table


def test_unfinished_and_unlike_runs_are_refused(tmp_path: Path) -> None:
    done = make_run(tmp_path / "done", seed=1)
    with pytest.raises(UserError, match=r"going' is not finished: it has no summary\.json"):
        collect_results([done, make_run(tmp_path / "going", seed=2, finished=False)])
    paper = {"compress": {"accounting": "paper"}}
    with pytest.raises(UserError, match=r"compress\.accounting is 'fma' in one and 'paper'"):
        collect_results([done, make_run(tmp_path / "paper", seed=3, changes=paper)])
    with pytest.raises(UserError, match=r"task\.name is"):
        collect_results([done, make_run(tmp_path / "task", seed=4, task="lm")])
