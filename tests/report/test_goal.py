"""What runs name, and how reports say it: two figures together, parameters, or nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.errors import UserError
from gaugelasso.report.arms import arms_table
from gaugelasso.report.data import Condition, load_run
from gaugelasso.report.goal import goal, goal_cell, is_held, is_mostly_held
from gaugelasso.report.page_data import page_data
from gaugelasso.report.pareto import load_points, pareto_table
from gaugelasso.report.results import collect_arms
from gaugelasso.report.run import Run
from gaugelasso.report.tables import before_after, runs_table
from gaugelasso.report.verdict import verdict
from tests.report.folders import make_run

ANY = {"target": {"loss": 1e30}}
BOTH = {"target": {"loss": 0.05, "metric": 0.9995}}


def run_of(path: Path, loss: float = 0.03, selection: Any = 0.9996, **options: Any) -> Run:
    """A finished run that names a loss of 0.05 and an accuracy of 0.9995."""
    make_run(path, loss=loss, changes=BOTH, **options)
    summary = json.loads((path / "summary.json").read_text())
    held = loss <= 0.05 and isinstance(selection, float) and selection >= 0.9995
    summary |= {"metric_target": 0.9995, "selection_metric": selection, "held": held}
    (path / "summary.json").write_text(json.dumps(summary))
    return load_run(path)


def test_both_are_named(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    assert goal([run]) == "loss target 0.05 and accuracy target 99.950%"
    assert goal_cell([run]) == "0.05 and accuracy target 99.950%"
    remarks = {row[0]: row[-1] for row in before_after([run]).rows}
    assert remarks["held-out loss"] == "target 0.05 and accuracy target 99.950%"


@pytest.mark.parametrize(
    ("loss", "selection", "held", "sentence"),
    [
        (0.03, 0.9996, True, "within the loss target of 0.05; accuracy 99.960% on selection data, "
         "which meets the target of 99.950%; 99.960% on test data."),
        (0.06, 0.9996, False, "above the loss target of 0.05; accuracy 99.960% on selection data, "
         "which meets the target of 99.950%; 99.960% on test data."),
        (0.03, 0.9, False, "within the loss target of 0.05; accuracy 90.000% on selection data, "
         "which misses the target of 99.950%; 99.960% on test data."),
        (0.06, None, False, "above the loss target of 0.05; accuracy — on selection data, "
         "which misses the target of 99.950%; 99.960% on test data."),
    ],
    ids=["held", "loss", "metric", "both"],
)  # fmt: skip
def test_a_run_is_held_if_both_are(
    loss: float, selection: float | None, held: bool, sentence: str, tmp_path: Path
) -> None:
    run = run_of(tmp_path / "run", loss, selection)
    assert is_held(run) is is_mostly_held([run]) is held
    assert verdict([run]) == (held, f"Held-out loss {loss:g}, {sentence}")


def test_a_loop_of_the_user_has_one_measurement(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run_of(path)
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | {"evaluated_on": "held-out data"}))
    assert verdict([load_run(path)])[1].endswith(
        "; accuracy 99.960% on held-out data, which meets the target of 99.950%."
    )


def test_seeds_are_held_where_both_are(tmp_path: Path) -> None:
    """The median loss is within its target, and the median seed is not: two miss the metric."""
    runs = [
        run_of(tmp_path / str(seed), selection=selection, seed=seed)
        for seed, selection in enumerate((0.9996, 0.9, 0.9))
    ]
    assert not is_mostly_held(runs)
    assert verdict(runs) == (
        False,
        "1 of 3 seeds end within the loss target of 0.05 and the accuracy target of 99.950% on "
        "held-out data.",
    )


def test_a_table_of_targets_does_not_call_both_a_loss(tmp_path: Path) -> None:
    run_of(tmp_path / "a")
    table = pareto_table(load_points([tmp_path / "a"]))
    assert table.headers[1] == "target"
    assert table.rows[0][1] == "0.05 and accuracy target 99.950%"


def parameter_run(path: Path, reached: float, held: bool, seed: int = 0) -> Run:
    """A finished run of CoFi to 8,000 parameters, with the loss target of its config."""
    make_run(path, loss=0.4, method="cofi", changes=ANY, seed=seed)
    summary = json.loads((path / "summary.json").read_text())
    cofi = {"objective": "parameters", "target": 8000.0, "reached": reached}
    changed = summary | {"loss_target": 1e30, "held": held, "cofi": cofi}
    (path / "summary.json").write_text(json.dumps(changed))
    return load_run(path)


def test_a_parameter_target_decides(tmp_path: Path) -> None:
    held, missed = (
        parameter_run(tmp_path / str(seed), reached, seed == 0, seed)
        for seed, reached in enumerate((8100.0, 9000.0))
    )
    assert [is_held(run) for run in (held, missed)] == [True, False]
    assert goal([held]) == goal_cell([held]) == "parameter target 8,000"
    assert verdict([held]) == (
        True,
        "8,100 parameters without the tables of the embedding, which meets the target of 8,000; "
        "held-out loss 0.4.",
    )
    assert verdict([missed])[0] is False
    assert "9,000 parameters" in verdict([missed])[1]
    assert "misses the target of 8,000" in verdict([missed])[1]
    assert verdict([held, missed]) == (
        False, "1 of 2 seeds end within the parameter target of 8,000.",
    )  # fmt: skip


def test_a_damaged_parameter_target_is_refused(tmp_path: Path) -> None:
    run = parameter_run(tmp_path / "run", 8100.0, True)
    path = run.path / "summary.json"
    for key in ("target", "reached"):
        cofi = {"objective": "parameters", "target": 8000.0, "reached": 8100.0} | {key: "few"}
        path.write_text(json.dumps((run.summary or {}) | {"cofi": cofi}))
        with pytest.raises(UserError, match=rf"'cofi\.{key}' is not a finite number"):
            load_run(run.path)


def test_plain_training_names_nothing(tmp_path: Path) -> None:
    """In sentences, headings, tables and pages: 1e30 is in the config alone."""
    runs = [
        load_run(make_run(tmp_path / str(seed), seed=seed, method="plain", changes=ANY))
        for seed in (0, 1)
    ]
    assert runs[0].loss_target is None
    assert verdict(runs[:1]) == (None, "No target is named; held-out loss 0.03.")
    assert verdict(runs) == (None, "No target is named.")
    assert goal(runs) == "no loss target"
    rows = {row[0]: row[1:] for row in before_after(runs).rows}
    assert rows["held-out loss"][-1] == ""
    assert "first batch within the loss target, step" not in rows
    table = runs_table(runs)
    assert {row[table.headers.index("first batch within target")] for row in table.rows} == {"—"}
    assert page_data(runs)["runs"][0]["target"] is None
    arm = Condition("plain", (), runs, seeds_requested=2)
    assert arms_table([arm], collect_arms([arm])).rows[0][-1] == "—"
    points = pareto_table(load_points([run.path for run in runs]))
    assert points.headers[1] == "target"
    assert points.rows[0][1] == "—"


def test_a_damaged_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"summary\.json': 'selection_metric' is not a number or"):
        run_of(tmp_path / "run", selection="high")
