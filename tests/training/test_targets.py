"""Runs that name something else than a loss: a work per token, or a metric."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.baselines.setting import loss_of, uniform_settings
from gaugelasso.compress.result import TargetMissed
from gaugelasso.config import run_config
from gaugelasso.config.target import TargetConfig
from gaugelasso.errors import UserError
from gaugelasso.report import write_report
from gaugelasso.report.advice import advise
from gaugelasso.report.data import load_run
from gaugelasso.report.goal import goal, is_held, is_mostly_held, misses_only_work
from gaugelasso.report.verdict import verdict
from gaugelasso.tasks import MaskedAutoencoder
from gaugelasso.training.opening import check_metric
from tests.tiny import tiny
from tests.tiny_runs import assert_same_run, keep_images, newest, read, rows, sign
from tests.training.target_runs import (
    BRIEF,
    KILLED,
    QUICK,
    assert_a_spoiled_end_gives_way,
    course_of,
    start,
)

WORK = TargetConfig(fma=300.0)
METRIC = TargetConfig(metric=0.3)


@pytest.fixture(scope="module")
def work_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = start(tmp_path_factory.mktemp("work"), WORK)
    keep_images(trainer, KILLED)
    trainer.run()
    return trainer.folder.path


@pytest.fixture(scope="module")
def metric_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = start(tmp_path_factory.mktemp("metric"), METRIC)
    keep_images(trainer, KILLED)
    trainer.run()
    return trainer.folder.path


# --- a work per token ----------------------------------------------------------------


def test_a_run_ends_at_the_work_that_it_names(work_run: Path) -> None:
    summary = read(work_run / "summary.json")
    assert summary["held"] is True
    assert summary["loss_target"] is None
    assert summary["fma_final"] <= summary["fma_target"] == 300.0
    assert summary["target_reached_step"] is None
    assert summary["structure_step"] <= summary["frozen_step"] < 48
    phases = {row["step"]: row["phase"] for row in rows(work_run, "metrics.jsonl")}
    assert {phase for step, phase in phases.items() if step > summary["frozen_step"]} == {
        "cooldown"
    }


def test_work_that_is_not_reached_is_an_error_with_what_was_reached(tmp_path: Path) -> None:
    with pytest.raises(TargetMissed, match=r"target\.fma = 11 was not reached in 60 steps: the"):
        start(tmp_path, TargetConfig(fma=11.0)).run()
    summary = read(tmp_path / "run" / "summary.json")
    assert summary["held"] is False
    assert summary["fma_final"] < summary["fma_initial"]
    assert verdict([load_run(tmp_path / "run")])[1].startswith(
        f"{summary['fma_final']:,.0f} FMA per token, above the work target of 11;"
    )
    told = rf"missed its target: its work is {summary['fma_final']:g} and target\.fma is 11; a "
    with pytest.raises(UserError, match=told + "baseline needs"):
        loss_of(tmp_path / "run", summary)


@pytest.mark.parametrize(("loss", "which"), [(1.7, "fma"), (0.001, "loss")])
def test_a_loss_does_not_make_up_for_work_that_is_missed(
    loss: float, which: str, tmp_path: Path
) -> None:
    said = {
        "fma": r"target\.fma = 11 was not reached in 60 steps",
        "loss": r"target\.loss = 0\.001 was never .* per token, above target\.fma = 11 as well, is",
    }[which]
    with pytest.raises(TargetMissed, match=said):
        start(tmp_path, TargetConfig(loss=loss, fma=11.0)).run()
    summary, run = read(tmp_path / "run" / "summary.json"), load_run(tmp_path / "run")
    assert (summary["held"], summary["loss_target"], summary["fma_target"]) == (False, loss, 11.0)
    assert not is_held(run)
    assert not is_mostly_held([run])
    work = f"{summary['fma_final']:,.0f} FMA per token, above the work target of 11"
    assert f"; {work}." in verdict([run])[1]
    assert goal([run]) == f"loss target {loss:g} and work target 11 FMA"
    with pytest.raises(UserError, match=r"its work is .* and target\.fma is 11; a "):
        loss_of(tmp_path / "run", summary)
    assert misses_only_work([run]) is (which == "fma")


def test_work_without_pressure_is_refused_at_the_start(tmp_path: Path) -> None:
    changes = {**QUICK, "compress__solver": "fixed", "compress__rho": 0.0}
    for target in (WORK, TargetConfig(loss=1e30, fma=300.0, hold="pressed")):
        with pytest.raises(UserError, match=r"target\.fma = 300: nothing is cut with compress\.s"):
            start(tmp_path, target, changes=changes)
        assert not (tmp_path / "run").exists()
    start(tmp_path, TargetConfig(fma=5000.0), changes=changes)  # it has this work already


def test_a_pressed_run_that_misses_its_work_is_an_error(tmp_path: Path) -> None:
    changes = {"train__steps": 40, "train__cooldown": 10}
    with pytest.raises(TargetMissed, match=r"target\.fma = 11 was not reached in 40 steps"):
        start(tmp_path, TargetConfig(loss=2.0, fma=11.0, hold="pressed"), changes=changes).run()


@pytest.mark.parametrize(
    "target", [{"fma": 0.5}, {"fma": 10.9}, {"fma": 10.9, "loss": 9.0}], ids=str
)
def test_work_that_no_cut_leads_to_is_refused_at_the_start(
    target: dict[str, Any], tmp_path: Path
) -> None:
    """The scale of an embedding of one channel, and a head of one channel and nine outputs."""
    said = rf"target\.fma = {target['fma']:g}: no cut leads below 11 FMA per token, .* name more"
    with pytest.raises(UserError, match=said):
        start(tmp_path, TargetConfig(**target))
    assert not (tmp_path / "run").exists()


# --- a metric ------------------------------------------------------------------------


def test_the_metric_on_selection_data_decides(metric_run: Path) -> None:
    summary, course = read(metric_run / "summary.json"), course_of(metric_run)
    assert summary["loss_target"] is None
    assert summary["metric_target"] == 0.3
    assert summary["selection_metric"] >= 0.3
    assert summary["held"] is True
    assert summary["fma_final"] < 0.8 * summary["fma_initial"]
    assert {met for _, met in course["pairs"]} == {False, True}
    assert course["trials"]


def test_a_metric_that_is_missed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TargetMissed, match=r"target\.metric = 1 was missed in 20 steps: accuracy"):
        start(tmp_path, TargetConfig(metric=1.0), changes=BRIEF).run()
    summary = read(tmp_path / "run" / "summary.json")
    assert summary["held"] is False
    _, sentence = verdict([load_run(tmp_path / "run")])
    assert "on selection data, which misses the target of 100.000%" in sentence


def test_a_metric_beyond_the_best_is_refused_at_the_start(tmp_path: Path) -> None:
    said = r"metric = 2: the best accuracy of any model is 1; name 1 or less, as 0\.99 for 99%"
    with pytest.raises(UserError, match=said):
        start(tmp_path, TargetConfig(metric=2.0))
    assert not (tmp_path / "run").exists()
    task = MaskedAutoencoder("faces.npy")
    below = replace(tiny(tmp_path), task=task, target=TargetConfig(metric=-0.1))
    with pytest.raises(UserError, match="best masked_mse of any model is 0; name 0 or more"):
        check_metric(below)
    check_metric(replace(below, target=TargetConfig(metric=0.0)))


def test_a_final_model_that_misses_the_metric_gives_way_to_one_that_met_it(
    metric_run: Path, tmp_path: Path
) -> None:
    assert_a_spoiled_end_gives_way(metric_run, tmp_path)


def test_damaged_pairs_are_not_resumed(metric_run: Path, tmp_path: Path) -> None:
    shutil.copytree(metric_run, tmp_path / "run")
    path = newest(tmp_path / "run")
    state = read(path / "state.json")
    state["course"]["pairs"] = [[0.5, "yes"]]
    (path / "state.json").write_text(json.dumps(state))
    sign(path)
    with pytest.raises(UserError, match=r"state\.json': course: pairs = "):
        start(tmp_path, METRIC, existing="resume")


# --- both ----------------------------------------------------------------------------


@pytest.fixture(params=["work_run", "metric_run"])
def run(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def test_a_killed_run_goes_on_to_the_last_bit(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run.with_name(str(KILLED)), tmp_path / "run")
    start(tmp_path, run_config(run).target, existing="resume").run()
    assert_same_run(run, tmp_path / "run")
    assert course_of(run) == course_of(tmp_path / "run")


@pytest.mark.usefixtures("undrawn")
def test_a_report_has_no_line_for_a_loss_that_is_not_named(run: Path, tmp_path: Path) -> None:
    loaded = load_run(run)
    assert loaded.loss_target is None
    files = write_report([run], tmp_path / "report")
    page = files.page.read_text()
    assert ("work target of 300" in page) is (loaded.metric_target is None)
    assert "first batch within the loss target" not in page
    assert advise([run]).verdict == verdict([loaded])[1]


def test_a_baseline_takes_the_loss_of_the_run(run: Path) -> None:
    summary = read(run / "summary.json")
    assert loss_of(run, summary) == summary["selection_loss"]
    settings = uniform_settings(run, summary, {})
    assert (settings.target.kind, settings.target.hold) == ("loss", "pressed")
    assert settings.compress.rho == 0
