"""Runs whose `target.loss` is that of the final model: whole, killed and resumed, missed."""

import json
import logging
import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.compress.courses.window import Measured
from gaugelasso.compress.result import TargetMissed
from gaugelasso.errors import UserError
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.training.course_run import CourseRun
from gaugelasso.training.missed import missed_message
from gaugelasso.training.phases import Phases
from gaugelasso.training.pressed_run import PressedRun
from gaugelasso.training.records import RunRecord
from gaugelasso.training.schedule import Schedule
from gaugelasso.training.state import RunState
from gaugelasso.training.trainer import Trainer
from tests.tiny import tiny
from tests.tiny_runs import (
    assert_same_run,
    finish,
    finished,
    killed,
    newest,
    read,
    rows,
    sign,
    start,
    start_at,
    stop_at,
)
from tests.training.spoilers import empty, poison, returns

# Presses so fast that its third trial fails. Its last trial ends at a step that is also logged.
COURSE: dict[str, Any] = {
    "target__hold": "final",
    "target__loss": 1.9,
    "compress__interval": 3,
    "compress__trust": 6.0,
    "train__steps": 50,
}
TRIALS = [13, 22, 31, 40]


def course_of(folder: Path) -> dict[str, Any]:
    """The course in the newest checkpoint."""
    return read(newest(folder) / "state.json")["course"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that returns from a failed trial and ends within its loss."""
    return finished(tmp_path_factory.mktemp("course"), **COURSE)


# --- a whole run ---------------------------------------------------------------------


def test_a_run_ends_within_the_loss_it_names(run: Path) -> None:
    summary, course = read(run / "summary.json"), course_of(run)
    assert summary["held"] is True
    assert max(summary["loss"], summary["selection_loss"]) <= summary["loss_target"] == 1.9
    assert summary["fma_final"] < 0.2 * summary["fma_initial"]
    assert summary["steps"] == 50
    assert [row["step"] for row in course["trials"]] == TRIALS
    assert summary["held_step"] == course["held_at"] == 40


def test_phases_and_rates_are_in_the_metrics(run: Path) -> None:
    logged = {row["step"]: (row["phase"], row["lr"]) for row in rows(run, "metrics.jsonl")}
    assert list(logged) == list(range(5, 51, 5))
    names = [phase for phase, _ in logged.values()]
    assert list(dict.fromkeys(names)) == ["compression", "trial", "cooldown"]
    assert [step for step, (phase, _) in logged.items() if phase == "trial"] == [20, 30, 40]
    assert logged[10] == logged[25] == ("compression", 0.04)
    # The rates of the steps, where a stage ends too, not of the stage that follows.
    assert logged[40][1] == pytest.approx(0.002 + 0.038 / 4)
    assert 0.002 < logged[50][1] < 0.003


def test_a_failed_trial_returns_to_the_last_good_state(run: Path) -> None:
    assert returns(run) == [(31, 22)]
    second, third = course_of(run)["trials"][1:3]
    (back,) = [e for e in rows(run, "events.jsonl") if e["returned_to"] is not None]
    assert (back["fma_before"], back["fma"]) == (third["fma"], second["fma"])
    assert third["selection_loss"] > 1.9


def test_there_are_no_events_in_trials(run: Path) -> None:
    steps = [e["step"] for e in rows(run, "events.jsonl") if e["returned_to"] is None]
    trials = {step for end in TRIALS for step in range(end - 2, end + 1)}
    assert not trials & set(steps)
    assert max(steps) > 40  # the last anneal is pressed


# --- killed and resumed --------------------------------------------------------------


@pytest.mark.parametrize("died_at", [24, 32, 42])
def test_a_killed_run_goes_on_to_the_last_bit(run: Path, tmp_path: Path, died_at: int) -> None:
    """Before and after trials, the one that failed too, and in the last anneal."""
    killed(tmp_path, died_at, **COURSE)
    start(tmp_path, existing="resume", **COURSE).run()
    assert_same_run(run, tmp_path / "run")
    assert course_of(run) == course_of(tmp_path / "run")


def test_a_run_killed_again_and_again_goes_on(run: Path, tmp_path: Path) -> None:
    killed(tmp_path, 14, **COURSE)
    for died_at in (23, 31, 36, 45):
        stop_at(start(tmp_path, existing="resume", **COURSE), died_at)
    start(tmp_path, existing="resume", **COURSE).run()
    assert_same_run(run, tmp_path / "run")


DAMAGED: list[tuple[str, Any]] = [
    ("stage", "flight"), ("ends_at", None), ("recent", ["x"]), ("trials", [7]), ("good_at", 1e9)
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), DAMAGED, ids=lambda value: str(value))
def test_a_damaged_course_is_not_resumed(run: Path, tmp_path: Path, name: str, value: Any) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = newest(tmp_path / "run")
    state = read(path / "state.json")
    state["course"][name] = value
    (path / "state.json").write_text(json.dumps(state))
    sign(path)
    with pytest.raises(UserError, match=rf"state\.json': course: {name} = "):
        start(tmp_path, existing="resume", **COURSE)


@pytest.mark.parametrize("course", [None, [], "x"], ids=str)
def test_a_course_that_is_no_table_is_not_resumed(run: Path, tmp_path: Path, course: Any) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = newest(tmp_path / "run")
    (path / "state.json").write_text(json.dumps({**read(path / "state.json"), "course": course}))
    sign(path)
    with pytest.raises(UserError, match=r"state\.json': course"):
        start(tmp_path, existing="resume", **COURSE)


def test_the_meaning_of_the_loss_does_not_change_on_resume(run: Path) -> None:
    pressed = COURSE | {"target__hold": "pressed"}
    with pytest.raises(UserError, match=r"target\.hold"):
        start(run.parent, existing="resume", **pressed)


# --- returns -------------------------------------------------------------------------


def test_a_return_to_a_state_that_did_not_hold_is_not_called_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state before all trials is returned to, and the summary names no held step."""
    honest = Trainer._measured

    def worse(self: Trainer, thorough: bool) -> Measured:
        measured = honest(self, thorough)
        return measured._replace(loss=measured.loss + 2)

    monkeypatch.setattr(Trainer, "_measured", worse)
    summary = run_to_end(start(tmp_path, **COURSE))
    course = course_of(tmp_path / "run")
    assert returns(tmp_path / "run")
    assert course["held_at"] is None
    assert summary["held_step"] is None


def test_without_the_checkpoint_to_return_to_a_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start_at(tmp_path, 28, **COURSE)
    take = trainer._step

    def one() -> Any:
        if trainer.compressor.steps == 30:
            empty(trainer.folder.checkpoints / "step-00000022")
        return take()

    trainer._step = one  # type: ignore[method-assign]
    caplog.set_level(logging.WARNING)
    summary = run_to_end(trainer)
    assert "step-00000022" in caplog.text
    # At the end it takes the larger state whose trial held.
    assert returns(tmp_path / "run") == [(50, 13)]
    assert summary["steps"] == 50


def test_the_state_that_is_left_is_gone_before_the_other_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A return needs no more memory than training, also in the middle of a decision."""
    trainer = start_at(tmp_path, 28, **COURSE)
    left, alive, taking = weakref.ref(trainer.compressor), [], RunState._set_model

    def look(state: RunState, model: Any) -> None:
        alive.append(left() is not None)
        taking(state, model)

    monkeypatch.setattr(RunState, "_set_model", look)
    trainer.run()
    assert returns(tmp_path / "run") == [(31, 22)]
    assert alive == [False]


def run_to_end(trainer: Trainer) -> dict[str, Any]:
    try:
        return trainer.run()
    except TargetMissed:
        return read(trainer.folder.path / "summary.json")


def test_steps_that_fail_return_to_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = COURSE | {"train__skip_limit": 3}
    poison(monkeypatch, range(24, 28))
    whole = finish(tmp_path, "whole", **settings)
    assert (27, 22) in returns(whole)
    assert read(whole / "summary.json")["held"]


def test_a_final_model_that_misses_gives_way_to_the_last_that_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start_at(tmp_path, 45, **COURSE)
    take = trainer._step

    def one() -> Any:
        event = take()
        if trainer.compressor.steps == 50:
            trainer.compressor.optimizer.store.weight.mul_(30)
        return event

    trainer._step = one  # type: ignore[method-assign]
    summary = trainer.run()
    run = tmp_path / "run"
    assert returns(run)[-1] == (50, 40)
    assert summary["held"] is True
    assert summary["held_step"] == 40
    assert summary["fma_final"] == course_of(run)["trials"][-1]["fma"]
    assert math.isclose(summary["selection_loss"], course_of(run)["trials"][-1]["selection_loss"])
    assert load_model(run).structure() == trainer.model.structure()


# --- a loss that is missed -----------------------------------------------------------


def test_a_missed_loss_is_an_error_and_in_the_summary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(TargetMissed, match=r"target\.loss = 0\.1 was never reached in 50 steps"):
        finish(tmp_path, **(COURSE | {"target__loss": 0.1}))
    summary = read(tmp_path / "run" / "summary.json")
    assert summary["held"] is False
    assert summary["held_step"] is None
    assert summary["loss"] > 0.1
    said = [record.message for record in caplog.records]
    assert len(said) == len(course_of(tmp_path / "run")["trials"])
    assert "above the named 0.1; the target is not missed yet" in said[0]
    assert issubclass(TargetMissed, UserError)


def test_warnings_of_trials_have_the_unit_of_the_price_and_no_forecast(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trials miss the loss that the run has at its end."""
    caplog.set_level(logging.WARNING)
    run = finished(tmp_path, **COURSE, compress__accounting="bytes")
    trials = course_of(run)["trials"]
    said = [record.message for record in caplog.records]
    doubts = [each for each in said if "after a trial anneal at" in each]
    missed = [row for row in trials if row["selection_loss"] > 1.9]
    assert len(doubts) == len(missed) > 0
    for text, row in zip(doubts, missed, strict=True):
        assert f"the model of {row['fma']:,.0f} bytes has a loss of" in text
        assert text.endswith("the last anneal follows, which is longer and lowers the loss further")
    ((_, to),) = returns(run)
    (back,) = [each for each in said if "back to the state" in each]
    assert back.endswith(f"as is normal after such a trial; back to the state of step {to}")
    assert not any("FMA" in each for each in said)
    assert missed[0]["selection_loss"] > read(run / "summary.json")["loss"] <= 1.9


def test_a_loss_that_only_training_reached_is_not_called_never_reached(run: Path) -> None:
    summary = {**read(run / "summary.json"), "loss": 2.5}
    said = missed_message(RunRecord(best_loss=1.8), summary, "checkpoints")
    assert "target.loss = 1.9 was missed in 50 steps (held-out loss 2.5, best training loss" in said
    said = missed_message(RunRecord(best_loss=2.1), summary, "checkpoints")
    assert "target.loss = 1.9 was never reached in 50 steps" in said


# --- a work target -------------------------------------------------------------------


def test_a_work_target_that_is_met_starts_the_anneal(tmp_path: Path) -> None:
    goal = COURSE | {"target__fma": 300, "target__loss": 2.05}
    whole = finished(tmp_path, "whole", **goal)
    summary = read(whole / "summary.json")
    frozen = summary["frozen_step"]
    assert 4 < frozen < 30
    assert summary["fma_final"] <= 300
    assert summary["steps"] == 50
    assert summary["structure_step"] <= frozen
    phases = {row["step"]: row["phase"] for row in rows(whole, "metrics.jsonl")}
    assert {phase for step, phase in phases.items() if step > frozen} == {"cooldown"}
    killed(tmp_path, frozen + 12, "died", **goal)
    start(tmp_path, "died", "resume", **goal).run()
    assert_same_run(whole, tmp_path / "died")


# --- the two kinds of runs -----------------------------------------------------------


def test_a_pressed_run_has_no_course(tmp_path: Path) -> None:
    trainer = start(tmp_path)
    try:
        assert isinstance(trainer.driver, PressedRun)
        assert "course" not in trainer.driver.to_dict()
        assert trainer.driver.allowance(1.0) is None
    finally:
        trainer.folder.close()


def test_the_phases_of_a_pressed_run(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    phases = Phases(config, None, Schedule.of(config))  # type: ignore[arg-type]
    assert [phases.pressed_loss(step) for step in (3, 4, 29, 30)] == [None, 2.0, 2.0, None]
    assert phases.end == 40
    phases.freeze_(20)
    assert (phases.end, phases.phase(20)) == (30, "cooldown")
    phases.ended_at = 25
    assert phases.end == 25


def test_the_course_of_a_run_has_the_settings_of_its_config(tmp_path: Path) -> None:
    given = COURSE | {"train__warmup": 9, "train__cooldown": 25, "train__lr_min": 0.003}
    trainer = start(tmp_path, **given)
    trainer.folder.close()
    driver = trainer.driver
    assert isinstance(driver, CourseRun)
    course = driver.course
    assert (course.steps, course.lr, course.named) == (50, 0.04, 1.9)
    assert (course.warmup, course.anneal, course.least_rate) == (9, 25, 0.003)
    assert driver.end == 50
    assert (driver.rate(0), driver.phase(8), driver.phase(9)) == (
        pytest.approx(0.04 / 9), "warmup", "compression",
    )  # fmt: skip
    driver.ended_at = 37
    assert driver.end == 37


def test_both_kinds_of_runs_have_the_same_keys_in_a_checkpoint(run: Path, tmp_path: Path) -> None:
    """So that one check of a state, and one table of former keys, is for both."""
    trainer = start(tmp_path)
    trainer.folder.close()
    state = read(newest(run) / "state.json")
    assert state.keys() - {"logs", "steps"} == trainer.state.numbers().keys() | {"course"}
