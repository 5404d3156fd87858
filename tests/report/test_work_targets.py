"""Which runs with different work targets `compare` takes for seeds of one method."""

from pathlib import Path
from typing import Any

import pytest

from gaugelasso.errors import UserError
from gaugelasso.report import write_report
from gaugelasso.report.compare import compare_table
from gaugelasso.report.compare_results import compare_results
from tests.report.test_compare import change_summary, compared, run_at


def rivals_at(root: Path, works: dict[int, float], **options: Any) -> Path:
    """Runs of post-hoc pruning, each seed with a work target of its own."""
    for seed, work in works.items():
        run = run_at(root / f"{work:g}-s{seed}", work, 0.03, seed=seed, method="post-hoc")
        change_summary(run, pruning={"fma": work, "rounds": 8, "rounds_made": 8, **options})
    return root


def test_close_work_targets_are_one_method(tmp_path: Path) -> None:
    works = {0: 600.0, 1: 630.0, 2: 660.0}
    run_at(tmp_path / "ours", 600, 0.03)
    found = compared(tmp_path / "ours", rivals_at(tmp_path / "rivals", works))
    assert [*found.methods] == ["compression", "post-hoc"]
    table = compare_table(found)
    place = table.headers.index("work target")
    assert [row[place] for row in table.rows] == ["—", "—", "630 ± 30", "600", "630", "660"]
    data = compare_results(found)
    assert [run["work_target"] for run in data["runs"]] == [None, *works.values()]
    ours, rival = data["methods"]
    assert ours["work_target"] is None
    assert rival["work_target"] == {"mean": 630.0, "std": 30.0, "min": 600.0, "max": 660.0}
    assert rival["conditions"]["fma"] == "600 to 660"


def test_work_targets_of_cofi_and_of_a_config_are_joined_too(tmp_path: Path) -> None:
    for seed, work in ((0, 500.0), (1, 520.0)):
        changes = {"target": {"loss": None, "fma": work}}
        run_at(tmp_path / f"ours{seed}", work, 0.03, seed=seed, changes=changes)
        run = run_at(tmp_path / f"cofi{seed}", work, 0.03, seed=seed, method="cofi")
        change_summary(run, cofi={"objective": "fma", "target": work, "reached": work})
    found = compared(tmp_path)
    assert {name: len(members) for name, members in found.methods.items()} == {
        "cofi": 2, "compression": 2,
    }  # fmt: skip
    assert found.work_targets("cofi") == found.work_targets("compression") == [500.0, 520.0]


def test_one_work_target_needs_no_column(tmp_path: Path) -> None:
    found = compared(rivals_at(tmp_path, {0: 600.0, 1: 600.0}))
    assert [*found.methods] == ["post-hoc"]
    assert "work target" not in compare_table(found).headers
    assert compare_results(found)["methods"][0]["conditions"]["fma"] == 600.0


def test_other_works_and_other_options_stay_apart(tmp_path: Path) -> None:
    """More than 10%, another option beside the work, or one seed at two works."""
    far = compared(rivals_at(tmp_path / "far", {0: 600.0, 1: 630.0, 2: 900.0}))
    assert {name: len(members) for name, members in far.methods.items()} == {
        "post-hoc (fma = 600 to 630)": 2, "post-hoc (fma = 900)": 1,
    }  # fmt: skip
    one, other = tmp_path / "one", tmp_path / "other"
    rivals_at(one, {0: 600.0})
    rivals_at(other, {1: 630.0}, rounds=4)
    assert [*compared(one, other).methods] == [
        "post-hoc (fma = 600, rounds = 8)", "post-hoc (fma = 630, rounds = 4)",
    ]  # fmt: skip
    again = rivals_at(tmp_path / "again", {0: 630.0})
    assert [*compared(one, again).methods] == ["post-hoc (fma = 600)", "post-hoc (fma = 630)"]


def test_a_report_takes_runs_of_one_condition_alone(tmp_path: Path) -> None:
    """Rivals have the settings of their full model, so that only their options tell them apart."""
    runs = rivals_at(tmp_path / "runs", {0: 600.0, 1: 630.0})
    write_report([runs], tmp_path / "close")
    rivals_at(runs, {2: 600.0}, rounds=4)
    with pytest.raises(UserError, match="not runs of one condition: rounds is 8 in one and 4 in"):
        write_report([runs], tmp_path / "out")
    far = rivals_at(tmp_path / "far", {0: 600.0, 1: 630.0, 2: 700.0})
    with pytest.raises(UserError, match=r"fma is 630\.0 in one and 700\.0 in the other; up to 10%"):
        write_report([far], tmp_path / "out")
    sources = tmp_path / "sources"
    for seed, method in enumerate(("plain", "compression")):
        run = run_at(sources / str(seed), 600, 0.03, seed=seed, method="post-hoc")
        change_summary(run, source={"method": method, "steps": 100, "training_fma": 3e4})
    with pytest.raises(UserError, match=r"source\.method is 'plain' in one and 'compression' in"):
        write_report([sources], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_cofi_without_a_bound_is_another_condition(tmp_path: Path) -> None:
    """Early versions had no bound, and did not say so."""
    for seed, bound in enumerate(({}, {"mask_bound": 0.0}, {"mask_bound": 4.6})):
        run = run_at(tmp_path / str(seed), 600, 0.03, seed=seed, method="cofi")
        plan = {"objective": "fma", "target": 600.0, "reached": 600.0, "mask_rate": 0.01}
        change_summary(run, cofi=plan | bound)
    write_report([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    with pytest.raises(UserError, match=r"mask_bound is 0\.0 in one and 4\.6 in the other"):
        write_report([tmp_path / "0", tmp_path / "2"], tmp_path / "out")


def test_what_is_not_given_or_has_no_effect_names_no_method(tmp_path: Path) -> None:
    """A summary has all options of `prune`, also those that its target makes no use of."""
    plans = {
        "work": {"fma": 600.0, "loss": None, "rounds": 3, "channels": 1, "corrective": 10},
        "ceiling": {"fma": None, "loss": 0.02, "rounds": 10, "channels": 5, "corrective": 10},
    }
    for name, plan in plans.items():
        change_summary(run_at(tmp_path / name, 600, 0.03, method="post-hoc"), pruning=plan)
    found = compared(tmp_path)
    assert {*found.methods} == {
        "post-hoc (fma = 600, rounds = 3)", "post-hoc (loss = 0.02, channels = 5)",
    }  # fmt: skip
    rows = {row["method"]: row["conditions"] for row in compare_results(found)["methods"]}
    assert rows["post-hoc (fma = 600, rounds = 3)"]["channels"] is None
    assert rows["post-hoc (loss = 0.02, channels = 5)"]["rounds"] is None


def test_a_setting_that_one_run_lacks_is_none_in_its_name(tmp_path: Path) -> None:
    for name, metric in (("plain", None), ("exact", 0.99)):
        run_at(tmp_path / name, 100, 0.03, changes={"target": {"metric": metric}})
    assert {*compared(tmp_path).methods} == {
        "compression (target.metric = none)", "compression (target.metric = 0.99)",
    }  # fmt: skip
