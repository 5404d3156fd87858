"""Runs that name something else than a loss: a work per token, or a metric."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.baselines.setting import loss_of, plain_settings
from gaugelasso.compress.result import TargetMissed
from gaugelasso.config import run_config
from gaugelasso.config.target import TargetConfig
from gaugelasso.errors import UserError
from gaugelasso.report import write_report
from gaugelasso.report.advice import advise
from gaugelasso.report.data import load_run
from gaugelasso.report.verdict import verdict
from gaugelasso.runs.folder import Existing
from gaugelasso.training.trainer import Trainer
from tests.tiny import tiny
from tests.tiny_runs import assert_same_run, newest, read, rows, sign, stop_at

QUICK: dict[str, Any] = {"compress__interval": 2, "compress__trust": 6.0, "train__steps": 60}
WORK = TargetConfig(fma=300.0)
METRIC = TargetConfig(metric=0.3)


def start(
    folder: Path, target: TargetConfig, name: str = "run", existing: Existing = "refuse"
) -> Trainer:
    return Trainer(replace(tiny(folder, **QUICK), target=target), folder / name, existing)


def course_of(folder: Path) -> dict[str, Any]:
    return read(newest(folder) / "state.json")["course"]


@pytest.fixture(scope="module")
def work_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = start(tmp_path_factory.mktemp("work"), WORK)
    trainer.run()
    return trainer.folder.path


@pytest.fixture(scope="module")
def metric_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = start(tmp_path_factory.mktemp("metric"), METRIC)
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
    with pytest.raises(TargetMissed, match=r"target\.fma = 1 was not reached in 60 steps: the"):
        start(tmp_path, TargetConfig(fma=1.0)).run()
    summary = read(tmp_path / "run" / "summary.json")
    assert summary["held"] is False
    assert summary["fma_final"] < summary["fma_initial"]
    assert verdict([load_run(tmp_path / "run")])[1].startswith(
        f"{summary['fma_final']:,.0f} FMA per token, above the work target of 1;"
    )
    with pytest.raises(UserError, match="missed its target; a baseline needs"):
        loss_of(tmp_path / "run", summary)


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
    with pytest.raises(TargetMissed, match=r"target\.metric = 1 was missed in 60 steps: accuracy"):
        start(tmp_path, TargetConfig(metric=1.0)).run()
    summary = read(tmp_path / "run" / "summary.json")
    assert summary["held"] is False
    _, sentence = verdict([load_run(tmp_path / "run")])
    assert "on selection data, which misses the target of 100.000%" in sentence


def test_a_final_model_that_misses_the_metric_gives_way_to_one_that_met_it(tmp_path: Path) -> None:
    trainer = start(tmp_path, METRIC)
    take = trainer._step

    def one() -> Any:
        event = take()
        if trainer.compressor.steps == 60:
            trainer.compressor.optimizer.store.weight.mul_(30)
        return event

    trainer._step = one  # type: ignore[method-assign]
    summary = trainer.run()
    assert summary["held"] is True
    assert summary["held_step"] == course_of(tmp_path / "run")["held_at"] < 60
    assert rows(tmp_path / "run", "events.jsonl")[-1]["returned_to"] == summary["held_step"]


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


@pytest.mark.parametrize("died_at", [11, 40])
def test_a_killed_run_goes_on_to_the_last_bit(run: Path, tmp_path: Path, died_at: int) -> None:
    target = run_config(run).target
    stop_at(start(tmp_path, target), died_at)
    start(tmp_path, target, existing="resume").run()
    assert_same_run(run, tmp_path / "run")
    assert course_of(run) == course_of(tmp_path / "run")


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
    settings = plain_settings(run, summary, {})
    assert (settings.target.kind, settings.target.hold) == ("loss", "pressed")
    assert settings.compress.rho == 0
