"""A run that loses its target goes back to where it held it."""

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.runs import checkpoint
from gaugelasso.training.memory import Memory
from gaugelasso.training.watch import choices, off_target, pressure, returned_
from tests.spoilers import damage, poison, returns, spoil, spoil_ends, spoil_when_new
from tests.training import assert_same_run, finish, newest, plain, rows, start, stop_at


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


def test_every_return_halves_the_pressure() -> None:
    assert [pressure(returns) for returns in range(3)] == [1, 0.5, 0.25]


def test_a_state_that_was_gone_back_to_in_vain_is_not_tried_again() -> None:
    memory = Memory(held_at=20, held_before_at=10)
    assert choices(memory) == [20, 10]
    returned_(memory, 20)
    assert choices(memory) == [10]
    returned_(memory, 10)
    assert choices(memory) == [10]  # the last that there is
    memory.hold_(30, 1.0)
    assert choices(memory) == [30, 10]
    assert memory.returns == 2


def test_of_those_that_held_the_target_every_size_has_one() -> None:
    """The last two besides; of equal sizes the later one, of the smallest also the first."""
    memory = Memory()
    for step, fma in enumerate([900.0, 800.0, 500.0, 300.0, 300.0, 250.0, 240.0, 240.0], 1):
        memory.hold_(step, fma)
    assert memory.held == {8: 240.0, 7: 240.0, 5: 300.0, 3: 500.0, 2: 800.0}
    memory.hold_(9, 600.0)  # after a return
    assert memory.held == {8: 240.0, 7: 240.0, 5: 300.0, 3: 500.0, 9: 600.0, 2: 800.0}
    assert (memory.held_at, memory.held_before_at) == (9, 8)


@pytest.mark.parametrize("shrinking", [0.99, 0.9, 0.7])
def test_however_slowly_a_run_shrinks_it_remembers_its_way(shrinking: float) -> None:
    memory, fma, step = Memory(), 1e6, 0
    while fma > 1e4:
        fma, step = fma * shrinking, step + 1
        memory.hold_(step, fma)
    sizes = sorted(memory.held.values())
    assert sizes[0] == fma
    assert sizes[-1] > 4e5
    assert all(larger <= 2.25 * smaller for smaller, larger in pairwise(sizes))
    assert len(sizes) < 15


def test_what_a_checkpoint_keeps_comes_back() -> None:
    memory = Memory(held={3: 2.0}, held_at=3, loss=1.0)
    assert Memory(**plain(dataclasses.asdict(memory))) == memory


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
    assert trainer.memory.returns == 1


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
    damage(trainer, 23, lambda memory: [memory.held_at])
    assert trainer.run()["held"]
    assert returns(trainer.folder.path) == [(25, 10)]
    assert "it was to be gone back to, but is no more" in caplog.text


def test_where_the_last_two_are_damaged_an_older_one_serves(tmp_path: Path) -> None:
    trainer = start(tmp_path, train__patience=5, train__checkpoint_every=5, train__steps=80)
    spoil(trainer, at=42)
    damage(trainer, 43, lambda memory: [memory.held_at, memory.held_before_at])
    assert trainer.run()["held"]
    assert returns(trainer.folder.path)[0] == (45, 25)
    assert (trainer.folder.checkpoints / "step-00000035.damaged").exists()


def test_a_checkpoint_amid_a_row_is_judged_by_the_next(tmp_path: Path) -> None:
    """17 of the row's 20 steps come before it."""
    changes = {"train__checkpoint_every": 19, "train__log_every": 20, "train__patience": 0}
    trainer = start(tmp_path, train__steps=80, target__loss=3.0, **changes)
    spoil(trainer, at=57, factor=2)
    stop_at(trainer, 61)
    assert trainer.memory.loss is not None
    assert trainer.memory.loss <= 3.0
    assert (trainer.memory.pending_step, trainer.memory.held_at) == (57, 20)


def test_a_run_that_cannot_anneal_ends_on_the_state_that_held(tmp_path: Path) -> None:
    trainer = start(tmp_path, train__checkpoint_every=5)
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
    trainer = start(tmp_path, train__checkpoint_every=5)
    spoil(trainer, at=38)
    summary = trainer.run()
    run = trainer.folder.path
    assert returns(run) == [(40, 30)]
    assert summary["steps"] == 50
    assert summary["frozen_step"] == 40
    assert summary["held"]
    assert [row["phase"] for row in rows(run, "metrics.jsonl")][-2:] == ["cooldown"] * 2


@pytest.mark.parametrize("at", [26, 33, 44])
def test_a_run_that_went_back_can_be_killed_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Once because of losses that are no numbers, once because the anneal lost the target."""
    changes: dict[str, Any] = {"train__skip_limit": 5, "train__checkpoint_every": 5}
    poison(monkeypatch, range(20, 25))
    whole = start(tmp_path, "whole", **changes)
    spoil_when_new(whole)
    whole.run()
    broken = start(tmp_path, "broken", **changes)
    spoil_when_new(broken)
    stop_at(broken, at)
    again = start(tmp_path, "broken", "resume", **changes)
    spoil_when_new(again)
    again.run()
    assert returns(whole.folder.path) == [(25, 20), (40, 30)]
    assert_same_run(whole.folder.path, again.folder.path)
