"""A run that loses its target goes back to where it held it."""

import dataclasses
import shutil
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.errors import UserError
from gaugelasso.runs import checkpoint
from gaugelasso.runs.checkpoint import Checkpoint
from gaugelasso.training.answers import EndOn, ReturnTo, Stay
from gaugelasso.training.held import off_target
from gaugelasso.training.records import RunRecord
from gaugelasso.training.resume import present_keys
from gaugelasso.training.rollback import Rollback
from gaugelasso.training.schedule import Schedule
from tests.tiny import tiny
from tests.tiny_runs import (
    assert_same_run,
    finish,
    keep_images,
    newest,
    plain,
    rows,
    start,
    start_at,
    stop_at,
)
from tests.training.spoilers import (
    damage,
    poison,
    returns,
    rollback_of,
    spoil,
    spoil_ends,
    spoil_when_new,
)


def test_off_target_is_half_as_much_again() -> None:
    assert not off_target(0.075, 0.05, first=8.3)
    assert off_target(0.076, 0.05, first=8.3)
    assert off_target(float("nan"), 0.05, first=8.3)
    assert not off_target(-1.0, -1.0, first=1.0)


def test_a_target_far_from_zero_is_lost_sooner() -> None:
    """2% of the way from where training began: half of a language model's loss is a ruin."""
    assert not off_target(1.19, 1.1, first=5.6)
    assert off_target(1.20, 1.1, first=5.6)
    assert not off_target(9.0, 10.0, first=5.6)
    assert not off_target(14.0, 10.0, first=5.6)


class Shelf:
    """Checkpoints that are all there, but for damaged ones; losses on selection data by step."""

    def __init__(self, damaged: Collection[int] = (), losses: Mapping[int, float] | None = None):
        self.damaged, self.losses = damaged, losses or {}

    def first_intact(self, steps: Iterable[int]) -> Checkpoint | None:
        found = (Checkpoint(Path(f"step-{step}"), step) for step in steps)
        return next((saved for saved in found if saved.step not in self.damaged), None)

    def newest(self) -> Checkpoint | None:
        return None

    def selection_loss(self, saved: Checkpoint) -> float:
        return self.losses[saved.step]


def rollback(folder: Path, states: Shelf | None = None, **fields: Any) -> Rollback:
    config = tiny(folder)
    return Rollback(config, states or Shelf(), Schedule.of(config), **fields)


def returned_to(step: int) -> ReturnTo:
    return ReturnTo(Checkpoint(Path(f"step-{step}"), step), "a test")


def test_a_lost_target_halves_the_pressure_and_a_failed_step_does_not(tmp_path: Path) -> None:
    one = rollback(tmp_path)
    seen = [one.pressure]
    for step in (10, 20):
        one.returned_(returned_to(step), 30)
        seen.append(one.pressure)
    assert seen == [1, 0.5, 0.25]
    one.returned_(dataclasses.replace(returned_to(20), failed=True), 31)
    one.returned_(dataclasses.replace(returned_to(20), anneal_steps=5), 31)
    assert one.pressure == 0.25
    assert one.returns == 4


def test_pressure_comes_back_while_the_target_is_held(tmp_path: Path) -> None:
    """The wait is as many times the patience as the pressure was divided by."""
    one = rollback(tmp_path, pressure=0.25)
    patience, every = one.config.train.patience, one.config.train.log_every
    on, off = RunRecord(loss=1.9, first_loss=9.0, reached_at=3), RunRecord(loss=9.0, first_loss=9.0)
    seen = {}
    for interval in range(1, 10 * patience // every):
        one.after_interval(on, pressed=True)
        seen.setdefault(one.pressure, interval * every)
    assert seen == {0.25: every, 0.5: 4 * patience, 1.0: 6 * patience}
    off.reached_at = 3
    one.pressure, one.steps_on_target = 0.5, 2 * patience - every
    one.after_interval(off, pressed=True)
    one.after_interval(on, pressed=True)
    assert (one.pressure, one.steps_on_target) == (0.5, every)
    one.after_interval(on, pressed=False)  # in the anneal nothing presses, so nothing is learned
    assert one.steps_on_target == every
    one.pressure = 0.0  # of a checkpoint that was edited: no division by it
    one.after_interval(on, pressed=True)
    assert one.pressure == 0.0


def test_a_checkpoint_of_version_0_1_0_has_the_pressure_it_had() -> None:
    state = present_keys({"returns": 3, "off_for": 5})
    assert state == {"returns": 3, "steps_off_target": 5, "pressure": 0.125, "steps_on_target": 0}
    assert present_keys({"returns": "three"}) == {"returns": "three"}  # refused later, by name


def test_a_state_that_was_returned_to_without_success_is_not_tried_again(tmp_path: Path) -> None:
    one = rollback(tmp_path, held_at=20, held_before_at=10)
    assert one.held_steps() == [20, 10]
    one.returned_(returned_to(20), 30)
    assert one.held_steps() == [10]
    one.returned_(returned_to(10), 31)
    assert one.held_steps() == [10]  # there is no other
    one._hold_(30, 1.0)
    assert one.held_steps() == [30, 10]
    assert one.returns == 2


def test_of_those_that_held_the_target_every_size_has_one(tmp_path: Path) -> None:
    """The last two besides; of equal sizes the later one, of the smallest also the first."""
    one = rollback(tmp_path)
    for step, fma in enumerate([900.0, 800.0, 500.0, 300.0, 300.0, 250.0, 240.0, 240.0], 1):
        one._hold_(step, fma)
    assert one.held == {8: 240.0, 7: 240.0, 5: 300.0, 3: 500.0, 2: 800.0}
    one._hold_(9, 600.0)  # after a return
    assert one.held == {8: 240.0, 7: 240.0, 5: 300.0, 3: 500.0, 9: 600.0, 2: 800.0}
    assert (one.held_at, one.held_before_at) == (9, 8)


@pytest.mark.parametrize("shrinking", [0.99, 0.9, 0.7])
def test_however_slowly_a_run_shrinks_it_keeps_all_sizes(tmp_path: Path, shrinking: float) -> None:
    one, fma, step = rollback(tmp_path), 1e6, 0
    while fma > 1e4:
        fma, step = fma * shrinking, step + 1
        one._hold_(step, fma)
    sizes = sorted(one.held.values())
    assert sizes[0] == fma
    assert sizes[-1] > 4e5
    assert all(larger <= 2.25 * smaller for smaller, larger in pairwise(sizes))
    assert len(sizes) < 15


def test_what_a_checkpoint_keeps_comes_back(tmp_path: Path) -> None:
    one, other = rollback(tmp_path, held={3: 2.0}, held_at=3, returns=2), rollback(tmp_path)
    other.load_(plain(one.to_dict()))
    assert other.to_dict() == one.to_dict()
    assert other.held == {3: 2.0}
    record, copy = RunRecord(loss=1.0, unlogged=[2.0]), RunRecord()
    copy.load_(plain(record.to_dict()))
    assert copy == record


def test_a_checkpoint_keeps_each_number_once(tmp_path: Path) -> None:
    assert not rollback(tmp_path).to_dict().keys() & RunRecord().to_dict().keys()


# --- the four questions, without a run ---------------------------------------------------


def test_the_end_is_the_smallest_that_also_holds_on_selection_data(tmp_path: Path) -> None:
    held, record = {5: 400.0, 6: 300.0, 7: 200.0}, RunRecord(loss=1.9)
    losses = {5: 1.8, 6: 1.9, 7: 2.1}
    one = rollback(tmp_path, Shelf(losses=losses), held=held, held_at=7)
    answer = one.at_end(2.5, record, work_target_met=False)
    assert isinstance(answer, EndOn)
    assert answer.saved.step == 6
    one.returned_(answer, 40)
    assert (one.ended_at, one.end, one.held_at) == (40, 40, 6)
    assert one.at_end(2.5, record, work_target_met=False) == Stay()


def test_an_end_that_holds_stays(tmp_path: Path) -> None:
    one = rollback(tmp_path, held={5: 400.0}, held_at=5)
    assert one.at_end(2.0, RunRecord(loss=1.0), work_target_met=False) == Stay()


def test_an_anneal_that_lost_the_target_is_repeated_once(tmp_path: Path) -> None:
    one = rollback(tmp_path, Shelf(losses={5: 3.0}), held={5: 400.0}, held_at=5)
    answer = one.at_end(2.5, RunRecord(loss=2.6), work_target_met=False)
    assert isinstance(answer, ReturnTo)
    assert answer.anneal_steps == 10
    one.returned_(answer, 40)
    assert (one.phase(39), one.phase(40), one.end) == ("compression", "cooldown", 50)
    assert one.at_end(2.5, RunRecord(loss=2.6), work_target_met=False) == Stay()


def test_a_failure_prefers_the_newest_sound_state_and_then_those_that_held(tmp_path: Path) -> None:
    one = rollback(tmp_path, held={5: 400.0, 8: 300.0}, held_at=8, held_before_at=5)
    one.fallback_step = 12
    steps = []
    for _ in range(3):
        answer = one.after_failure("NaN", 20, work_target_met=False)
        assert isinstance(answer, ReturnTo)
        steps.append(answer.saved.step)
        one.returned_(answer, 20)
    assert steps[0] == 12
    assert set(steps[1:]) <= {5, 8}
    one.states = Shelf(losses={5: 1.0, 8: 1.0})
    assert isinstance(one.after_failure("NaN", 20, work_target_met=False), EndOn)


def test_failed_returns_count_only_in_a_row(tmp_path: Path) -> None:
    one = rollback(tmp_path, fallback_step=12)
    for _ in range(10):
        answer = one.after_failure("NaN", 20, work_target_met=False)
        assert isinstance(answer, ReturnTo)
        one.returned_(answer, 20)
        one.step_succeeded_()
    assert one.failed_returns == 0


def test_without_any_checkpoint_a_failure_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint yet"):
        rollback(tmp_path).after_failure("NaN at step 3", 3, work_target_met=False)


# --- losses that leave their target ------------------------------------------------------


def test_a_run_that_lost_its_target_goes_back_to_where_it_held_it(tmp_path: Path) -> None:
    changes = {"train__patience": 5, "train__checkpoint_every": 5, "train__log_every": 1}
    plain = finish(tmp_path, "plain", **changes)
    assert returns(plain) == []
    trainer = start(tmp_path, **changes)
    spoil(trainer, at=21)
    summary = trainer.run()
    run = trainer.folder.path
    assert returns(run) == [(26, 20)]
    losses = {row["step"]: row["loss"] for row in rows(run, "metrics.jsonl")}
    assert losses[26] > 3 > losses[27]
    assert summary["held"]
    assert summary["returns"] == 1
    event = next(e for e in rows(run, "events.jsonl") if e["returned_to"] == 20)
    there = next(e for e in rows(plain, "events.jsonl") if e["step"] == 20)
    assert event["widths"] == there["widths"]
    assert rollback_of(trainer).returns == 1


def test_the_first_row_within_the_target_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    """However far apart they are: there must be something to go back to."""
    changes = {"train__patience": 5, "train__checkpoint_every": 1000, "train__log_every": 1}
    trainer = start(tmp_path, **changes)
    spoil(trainer, at=21)
    summary = trainer.run()
    run = trainer.folder.path
    target = summary["loss_target"]
    first = next(r["step"] for r in rows(run, "metrics.jsonl") if r["loss"] <= target)
    assert returns(run) == [(26, first)]
    assert summary["held"]


def test_a_cut_that_costs_the_target_is_not_gone_back_to(tmp_path: Path) -> None:
    """The checkpoint of a step lies behind its event: judged by the steps after it."""
    trainer = start(tmp_path, train__patience=5, train__checkpoint_every=5)
    spoil(trainer, at=20)
    summary = trainer.run()
    assert returns(trainer.folder.path) == [(25, 15)]
    assert summary["held"]


def test_where_the_last_that_held_is_damaged_the_one_before_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start(tmp_path, train__patience=5, train__checkpoint_every=5)
    spoil(trainer, at=22)
    damage(trainer, 23, lambda rollback: [rollback.held_at])
    assert trainer.run()["held"]
    assert returns(trainer.folder.path) == [(25, 10)]
    assert "the run cannot go back to it" in caplog.text


def test_where_the_last_two_are_damaged_an_older_one_serves(tmp_path: Path) -> None:
    trainer = start(tmp_path, train__patience=5, train__checkpoint_every=5, train__steps=80)
    spoil(trainer, at=42)
    damage(trainer, 43, lambda rollback: [rollback.held_at, rollback.held_before_at])
    assert trainer.run()["held"]
    assert returns(trainer.folder.path)[0] == (45, 25)
    assert (trainer.folder.checkpoints / "step-00000035.damaged").exists()


def test_a_checkpoint_amid_a_row_is_judged_by_the_next(tmp_path: Path) -> None:
    """17 of the row's 20 steps come before it."""
    changes = {"train__checkpoint_every": 19, "train__log_every": 20, "train__patience": 0}
    trainer = start(tmp_path, train__steps=80, target__loss=3.0, **changes)
    spoil(trainer, at=57, factor=2)
    stop_at(trainer, 61)
    assert trainer.record.loss is not None
    assert trainer.record.loss <= 3.0
    assert (rollback_of(trainer).pending_step, rollback_of(trainer).held_at) == (57, 20)


def test_a_run_that_cannot_anneal_ends_on_the_state_that_held(tmp_path: Path) -> None:
    trainer = start_at(tmp_path, 33, train__checkpoint_every=5)
    spoil_ends(trainer, after=35)
    summary = trainer.run()
    run = trainer.folder.path
    assert [step for step, _ in returns(run)] == [40, 50]
    assert summary["steps"] == 50
    assert summary["loss"] < 3
    assert newest(run).name == "step-00000050"
    assert checkpoint.load_state(run)[0]["ended_at"] == 50


def test_without_patience_nothing_is_undone(tmp_path: Path) -> None:
    trainer = start(tmp_path, train__patience=0, train__checkpoint_every=5)
    spoil(trainer, at=21)
    trainer.run()
    assert [e for e in returns(trainer.folder.path) if e[0] < 40] == []


def test_what_held_stays_in_the_ring(tmp_path: Path) -> None:
    """However many come after it that did not."""
    trainer = start(
        tmp_path, train__patience=0, train__checkpoint_every=2, train__checkpoint_keep=2,
        train__log_every=1,
    )  # fmt: skip
    spoil(trainer, at=21)
    stop_at(trainer, 29)
    ring = sorted(path.name for path in trainer.folder.checkpoints.iterdir())
    assert ring == [f"step-000000{step}" for step in (18, 20, 26, 28)]


def test_an_anneal_that_loses_the_target_is_done_again(tmp_path: Path) -> None:
    trainer = start_at(tmp_path, 33, train__checkpoint_every=5)
    spoil(trainer, at=38)
    summary = trainer.run()
    run = trainer.folder.path
    assert returns(run) == [(40, 30)]
    assert summary["steps"] == 50
    assert summary["frozen_step"] == 40
    assert summary["held"]
    assert [row["phase"] for row in rows(run, "metrics.jsonl")][-2:] == ["cooldown"] * 2


def test_a_run_that_went_back_can_be_killed_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once because of losses that are no numbers, once because the anneal lost the target."""
    changes: dict[str, Any] = {"train__skip_limit": 5, "train__checkpoint_every": 5}
    poison(monkeypatch, range(20, 25))
    whole = start(tmp_path, "whole", **changes)
    kills = 26, 33, 44
    keep_images(whole, *kills)
    spoil_when_new(whole)
    whole.run()
    assert returns(whole.folder.path) == [(25, 20), (40, 30)]
    for at in kills:
        shutil.copytree(tmp_path / str(at), tmp_path / f"died-at-{at}")
        again = start(tmp_path, f"died-at-{at}", "resume", **changes)
        spoil_when_new(again)
        again.run()
        assert_same_run(whole.folder.path, again.folder.path)
