"""Results files: their content, and which runs may not be put into one."""

import json
from pathlib import Path

import pytest

from gaugelasso.errors import UserError
from gaugelasso.report import write_report
from gaugelasso.report.arms import arms_table
from gaugelasso.report.data import Condition, load_condition, load_run
from gaugelasso.report.layout import to_markdown
from gaugelasso.report.results import collect_arms, collect_results, results_table
from tests.report.folders import make_run

RESULTS = Path(__file__).parents[2] / "results"


def test_results_of_a_condition(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"r{seed}", seed=seed) for seed in (3, 1)]
    results = collect_results(folders)
    assert list(results) == [
        "command",
        "commit",
        "hardware",
        "date",
        "accounting",
        "metric_name",
        "runs",
    ]
    assert results["commit"] == "abc123"  # the same in all runs, so listed once
    assert results["command"].count("gaugelasso train demo.toml") == 2
    assert results["date"] == "2026-01-02T00:00:00+00:00/2026-01-04T00:00:00+00:00"
    assert [run["seed"] for run in results["runs"]] == [1, 3]
    assert results["runs"][0] == {
        "seed": 1,
        "steps": 100,
        "target_reached_step": 15,
        "fma_initial": 1000.0,
        "fma_final": 101.0,
        "compression": 1000 / 101,
        "loss": 0.03,
        "metric": 0.9996,
        "evaluated_on": None,
        "held": None,
        "returns": None,
        "parameters_final": 500,
        "resumed": [],
        "before_cooldown": {"step": 80, "loss": 0.079125, "metric": 0.5 + 80 / 250, "fma": 101.0},
        "training_fma": 40_000.0,
        "wall_s": 12.5,
        "structure": {
            "layers": 2,
            "operators": [{"kind": "attention", "depth": 0, "heads": 4, "kv_heads": 2}],
        },
    }


def test_results_copy_target_and_returns_from_the_summary(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    summary = json.loads((folder / "summary.json").read_text())
    copied = {"evaluated_on": "test", "held": True, "returns": 2, "parameters_final": 123}
    (folder / "summary.json").write_text(json.dumps(summary | copied))
    (run,) = collect_results([folder])["runs"]
    assert {key: run[key] for key in copied} == copied


@pytest.mark.usefixtures("undrawn")
def test_environments_of_start_and_resumes_are_listed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r")
    later = {"commit": "def456", "hardware": "H200", "date": "2026-03-01T00:00:00+00:00"}
    resumes = ({"step": step, **later} for step in (40, 60, 100))
    (folder / "resumed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in resumes))
    results = collect_results([folder])
    assert results["commit"] == "abc123; def456"
    assert results["hardware"] == "CPU, 2 cores; H200"
    assert results["date"] == f"2026-01-01T00:00:00+00:00/{later['date']}"
    assert results["runs"][0]["resumed"] == [40, 60]  # after the last step nothing was trained
    assert "abc123; def456" in write_report([folder]).page.read_text()


def test_results_as_a_markdown_table(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"r{seed}", seed=seed) for seed in (0, 10, 20)]
    lines = results_table(collect_results(folders), "retrieval").splitlines()
    assert lines[0] == "### retrieval"
    assert lines[4] == "| 0 | 100 | 15 | 1,000 | 100 | 10.0× | 0.03 | 99.960% | 12.5 s |"
    assert " | loss | accuracy | wall time |" in lines[2]
    early = {key: value for key, value in collect_results(folders).items() if key != "metric_name"}
    assert " | 0.03 | 0.9996 | 12.5 s |" in results_table(early, "retrieval")
    assert lines[7].startswith("| mean ± std | 100 | 15 | 1,000 | 110 ± 10 | 9.14× ± 0.83× |")
    assert "Accounting: fma. CPU, 2 cores" in lines[-1]


def test_a_run_that_names_nothing_reached_and_holds_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", changes={"target": {"loss": 1e30}})
    results = collect_results([run])
    (row,) = results["runs"]
    assert (row["target_reached_step"], row["held"]) == (None, None)
    assert "\n| 0 | 100 | — | 1,000 |" in results_table(results, "plain")


def test_one_run_has_no_mean(tmp_path: Path) -> None:
    table = results_table(collect_results([make_run(tmp_path / "r")]), "one")
    assert "mean" not in table


def test_unfinished_and_different_runs_are_refused(tmp_path: Path) -> None:
    done = make_run(tmp_path / "done", seed=1)
    with pytest.raises(UserError, match=r"unfinished' is not finished: summary\.json is missing"):
        collect_results([done, make_run(tmp_path / "unfinished", seed=2, finished=False)])
    paper = {"compress": {"accounting": "paper"}}
    with pytest.raises(UserError, match=r"compress\.accounting is 'fma' in one and 'paper'"):
        collect_results([done, make_run(tmp_path / "paper", seed=3, changes=paper)])
    with pytest.raises(UserError, match=r"task\.name is"):
        collect_results([done, make_run(tmp_path / "task", seed=4, task="lm")])


def test_a_run_without_compression_has_no_figures_before_cooldown(tmp_path: Path) -> None:
    assert load_run(make_run(tmp_path / "r", rows=0)).before_cooldown is None


def _of_sweeps() -> list[Path]:
    """Results of one condition or of arms; benchmarks and comparisons have files of their own."""
    found = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/*.json"))}
    return [
        path
        for path, data in found.items()
        if "arms" in data or any("method" not in run for run in data.get("runs", []))
    ]


@pytest.mark.parametrize("path", _of_sweeps(), ids=lambda path: path.name)
def test_the_kept_results_can_be_read(path: Path) -> None:
    """Older files lack the row before cooldown, or the step that reached the target."""
    results = json.loads(path.read_text())
    for each in results.get("arms", [results]):
        table = results_table({**results, **each}, path.stem)
        for run in each["runs"]:
            assert table.count(f"\n| {run['seed']} |") == 1


# --- arms ----------------------------------------------------------------------------


def two_arms(folder: Path) -> list[Condition]:
    """Three seeds within the target; two seeds of three, one of them above it."""
    good = [make_run(folder / "a" / f"seed{seed}", seed=seed) for seed in (0, 10, 20)]
    changes = {"compress": {"interval": 7}}
    poor = [
        make_run(folder / "b" / f"seed{seed}", seed=seed, loss=loss, changes=changes, rows=rows)
        for seed, loss, rows in ((1, 0.05, 10), (2, 0.0501, 0))
    ]
    return [
        Condition("base", (), load_condition(good), 3),
        Condition("odd | one", ("compress.interval=7",), load_condition(poor), 3),
    ]


def test_results_of_arms(tmp_path: Path) -> None:
    arms = two_arms(tmp_path)
    results = collect_arms(arms)
    assert list(results) == [
        "command",
        "commit",
        "hardware",
        "date",
        "accounting",
        "metric_name",
        "arms",
    ]
    assert results["date"].startswith("2026-01-01")
    assert [(arm["name"], arm["changes"]) for arm in results["arms"]] == [
        ("base", []),
        ("odd | one", ["compress.interval=7"]),
    ]
    alone = collect_results([run.path for run in arms[0].runs])
    assert results["arms"][0]["runs"] == alone["runs"]
    assert results["accounting"] == alone["accounting"]


def test_accountings_that_differ_are_all_listed(tmp_path: Path) -> None:
    paper = make_run(tmp_path / "p", changes={"compress": {"accounting": "paper"}})
    other = Condition("paper", ("compress.accounting=paper",), load_condition([paper]), 1)
    assert collect_arms([*two_arms(tmp_path), other])["accounting"] == "fma; paper"


def test_arms_as_a_table(tmp_path: Path) -> None:
    arms = two_arms(tmp_path)
    lines = to_markdown(arms_table(arms, collect_arms(arms))).splitlines()
    assert lines[2] == (
        "| arm | FMA after | compression | loss before cooldown | loss | "
        "accuracy before cooldown | accuracy | within target |"
    )
    assert lines[4] == "| base | 110 ± 10 | 9.14× | 0.08813 | 0.03 | 82.000% | 99.960% | 3/3 |"
    # Seed 2 has no row of the compression phase; the third seed is missing.
    assert lines[5].startswith(r"| odd \| one | 101.5 ± 0.7 | 9.85× | — | 0.05005 | — | 99.960%")
    assert lines[5].endswith("| 1/3 |")
    assert "Runs are missing, and count as not within the target, in: odd" in lines[-1]
    assert "Accounting: fma. CPU, 2 cores" in lines[-1]
