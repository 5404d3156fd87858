"""A run that loses its target, or its numbers, goes back to where it had them."""

import dataclasses
import math
import signal
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gaugelasso import checkpoint
from gaugelasso.errors import UserError
from gaugelasso.evaluation import evaluate
from gaugelasso.memory import Memory
from gaugelasso.models import Transformer
from gaugelasso.ranks import RankLost, Team
from gaugelasso.signals import Stopped
from gaugelasso.state import RunState
from gaugelasso.tasks import Draw, Retrieval
from gaugelasso.trainer import Trainer
from gaugelasso.watch import choices, off_target, pressure, returned_
from tests.training import (
    assert_same_run,
    final_tensors,
    finish,
    newest,
    plain,
    read,
    rows,
    start,
    stop_at,
)
from tests.trust.traps import Signals

SEED = 3  # of the tiny run


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
    """The last two besides; of equal sizes the later one."""
    memory = Memory()
    for step, fma in enumerate([900.0, 800.0, 500.0, 300.0, 300.0, 250.0, 240.0, 240.0], 1):
        memory.hold_(step, fma)
    assert memory.held == {8: 240.0, 7: 240.0, 5: 300.0, 3: 500.0, 2: 800.0}
    memory.hold_(9, 600.0)  # after a return
    assert memory.held == {8: 240.0, 5: 300.0, 3: 500.0, 9: 600.0, 2: 800.0}
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


# --- losses that are no numbers ----------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, steps: range) -> None:
    """The batches of these steps, counted from 0, have no loss."""
    honest = Retrieval.batch

    def batch(self: Retrieval, size: int, of: Draw, device: str) -> tuple[Tensor, Tensor]:
        inputs, targets = honest(self, size, of, device)
        poisoned = any(of == Draw(SEED, step) for step in steps)
        return inputs, torch.full_like(targets, -100) if poisoned else targets

    monkeypatch.setattr(Retrieval, "batch", batch)


def returns(folder: Path) -> list[tuple[int, int]]:
    """When the run went back, and where to."""
    events = rows(folder, "events.jsonl")
    return [(e["step"], e["returned_to"]) for e in events if e["returned_to"] is not None]


def test_a_step_without_a_loss_is_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, range(26, 27))
    trainer = start(tmp_path)
    update, weights = trainer.compressor.update_, []

    def one(loss: Tensor) -> Tensor:
        weights.append(trainer.compressor.optimizer.store.weight.clone())
        mean = update(loss)
        weights.append(trainer.compressor.optimizer.store.weight.clone())
        return mean

    trainer.compressor.update_ = one  # type: ignore[method-assign]
    trainer.run()
    before, after = weights[2 * 26 : 2 * 26 + 2]
    assert torch.equal(before, after)
    assert not torch.equal(*weights[2 * 27 : 2 * 27 + 2])
    run = trainer.folder.path
    assert read(run / "summary.json")["skipped_steps"] == 1
    assert returns(run) == []
    assert [row["skipped"] for row in rows(run, "metrics.jsonl")] == [0] * 5 + [1] * 3
    assert all(t.isfinite().all() for t in final_tensors(run).values() if t.is_floating_point())


def test_too_many_in_a_row_and_the_run_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a good step came before anybody looked."""
    poison(monkeypatch, range(21, 26))
    run = finish(tmp_path, train__skip_limit=5)
    assert returns(run) == [(30, 20)]
    run = finish(tmp_path, "patient", train__skip_limit=6)
    assert returns(run) == []
    monkeypatch.undo()
    poison(monkeypatch, range(20, 30))
    run = finish(tmp_path, "worse", train__skip_limit=5)
    assert returns(run) == [(25, 20), (30, 20)]
    summary = read(run / "summary.json")
    assert summary["returns"] == 2
    assert summary["skipped_steps"] == 10
    assert summary["steps"] == 40


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_a_first_step_may_fail_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    poison(monkeypatch, range(1))
    run = finish(tmp_path, compress__optimizer=optimizer)
    assert read(run / "summary.json")["skipped_steps"] == 1
    assert all(t.isfinite().all() for t in final_tensors(run).values() if t.is_floating_point())


def test_a_run_that_finds_no_way_on_stops_with_its_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, range(22, 400))
    with pytest.raises(UserError) as told:
        finish(tmp_path, train__skip_limit=5, train__steps=100, train__checkpoint_every=20)
    run = tmp_path / "run"
    assert [step for step, _ in returns(run)] == [30, 35, 40]
    seed = Draw(SEED, 44).seed
    said = f"loss or gradient not a number at step 45 (batch seed {seed}); last good checkpoint: "
    assert said + repr(str(run / "checkpoints" / "step-00000040")) in str(told.value)
    assert not (run / "summary.json").exists()
    assert checkpoint.load_state(run)[0]["steps"] == 40
    assert all(t.isfinite().all() for t in final_tensors(run).values() if t.is_floating_point())


@pytest.mark.parametrize("every", [1, 5])
def test_without_a_checkpoint_the_stop_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    poison(monkeypatch, range(400))
    with pytest.raises(UserError, match=r"not a number at step \d .*no checkpoint yet"):
        finish(tmp_path, train__log_every=every, train__skip_limit=5)


def test_few_failing_steps_are_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of nothing else has no loss and is left out, not given the loss of the one before."""
    poison(monkeypatch, range(2))
    run = finish(tmp_path, train__log_every=1)
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == list(range(3, 41))
    assert read(run / "summary.json")["skipped_steps"] == 2


def test_a_loss_of_minus_infinity_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, seen = Retrieval.loss, []

    def loss(self: Retrieval, outputs: Tensor, targets: Tensor) -> Tensor:
        seen.extend([1] * torch.is_grad_enabled())
        sunk = torch.is_grad_enabled() and len(seen) == 7
        return honest(self, outputs, targets) - (math.inf if sunk else 0)

    monkeypatch.setattr(Retrieval, "loss", loss)
    summary = read(finish(tmp_path) / "summary.json")
    assert summary["skipped_steps"] == 1
    assert summary["target_reached_step"] != 7


def test_a_failing_step_is_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, range(19, 20))
    trainer = start(tmp_path)
    stop_at(trainer, 25)
    assert newest(trainer.folder.path).name == "step-00000010"


def test_a_stop_at_a_failing_step_saves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it says: also where a checkpoint is due, which would have waited."""
    poison(monkeypatch, range(19, 20))
    whole = finish(tmp_path, "whole")
    with Signals(19), pytest.raises(Stopped, match="after step 20, which is saved"):
        finish(tmp_path)
    assert newest(tmp_path / "run").name == "step-00000020"
    start(tmp_path, existing="resume").run()
    assert_same_run(whole, tmp_path / "run")


def test_a_failing_last_step_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, range(39, 40))
    run = finish(tmp_path, train__checkpoint_every=100)
    assert returns(run) == []
    assert newest(run).name == "step-00000040"
    assert read(run / "summary.json")["skipped_steps"] == 1


# --- losses that leave their target ------------------------------------------------------


def spoil(trainer: Trainer, at: int) -> None:
    """After this step, once, the weights are a hundred times what they were."""
    finish_step = trainer.compressor.finish_step_

    def spoiling() -> Any:
        event = finish_step()
        if trainer.compressor.steps == at:
            trainer.compressor.optimizer.store.weight.mul_(100)
        return event

    trainer.compressor.finish_step_ = spoiling  # type: ignore[method-assign]


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


def spoil_ends(trainer: Trainer, after: int = 33) -> None:
    """No step after this one, and no anneal, succeeds."""
    take = trainer._step

    def one() -> Any:
        event = take()
        if trainer.memory.frozen_at or trainer.compressor.steps > after:
            trainer.compressor.optimizer.store.weight.mul_(3)
        return event

    trainer._step = one  # type: ignore[method-assign]


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
    take = trainer._step

    def one() -> Any:
        if trainer.compressor.steps == 23:
            path = trainer.folder.checkpoints / f"step-{trainer.memory.held_at:08d}"
            (path / "model.safetensors").write_bytes(b"")
        return take()

    trainer._step = one  # type: ignore[method-assign]
    assert trainer.run()["held"]
    assert returns(trainer.folder.path) == [(25, 10)]
    assert "it held the target, but is no more" in caplog.text


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
    held = summary["held_step"]
    assert returns(run) == [(40, held)]
    assert summary["steps"] == 50
    assert summary["frozen_step"] == 40
    assert summary["held"]
    assert [row["phase"] for row in rows(run, "metrics.jsonl")][-2:] == ["cooldown"] * 2


# --- ends that miss the target -----------------------------------------------------------


def test_the_end_is_the_smallest_state_that_held(tmp_path: Path) -> None:
    """A run that cannot anneal has tried the last that held; as it was, it is still the one."""
    for seed in (3, 5, 8):
        changes = {"train__checkpoint_every": 5, "compress__trust": 1.2, "train__seed": seed}
        trainer = start(tmp_path, f"seed{seed}", **changes)
        spoil_ends(trainer)
        summary = trainer.run()
        run = trainer.folder.path
        assert trainer.memory.ended_at is not None
        held, fma = checkpoint.load_state(run)[0]["held"], summary["fma_final"]
        assert fma in held.values()
        assert summary["held"]
        for step, size in held.items():
            if size < fma:
                found = checkpoint.at_step(trainer.folder.checkpoints, int(step))
                loss, _ = evaluate(found.model(), trainer.config, 2, "cpu")
                assert loss > summary["loss_target"]


def forgetful(monkeypatch: pytest.MonkeyPatch, fewer_than: int) -> None:
    """Models with so few parameters do worse on held-out data."""

    def worse(model: Transformer, *rest: Any) -> tuple[float, float]:
        loss, metric = evaluate(model, *rest)
        return loss + (sum(p.numel() for p in model.parameters()) < fewer_than), metric

    for room in ("trainer", "ending"):
        monkeypatch.setattr(f"gaugelasso.{room}.evaluate", worse)


def test_a_target_held_in_training_alone_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends on the smallest structure on its way that holds it on held-out data too."""
    changes = {"train__checkpoint_every": 5, "train__log_every": 1}
    plain = finish(tmp_path, "plain", **changes)
    few = read(plain / "summary.json")["parameters_final"] + 1
    forgetful(monkeypatch, few)
    trainer = start(tmp_path, **changes)
    summary = trainer.run()
    assert summary["held"]
    assert summary["parameters_final"] >= few
    assert returns(trainer.folder.path) == [(40, summary["held_step"])]
    for step, fma in trainer.memory.held.items():
        if fma < summary["fma_final"]:  # missed, for having too few
            model = checkpoint.at_step(trainer.folder.checkpoints, step).model()
            assert sum(p.numel() for p in model.parameters()) < few
    assert newest(trainer.folder.path).name == "step-00000040"


def test_states_are_judged_as_the_end_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a task brings its own loss over all held-out data, by that one."""
    figures = {"loss": 9.0}
    monkeypatch.setattr("gaugelasso.ending.final_figures", lambda *_: dict(figures))
    trainer = start(tmp_path, train__checkpoint_every=5)
    summary = trainer.run()
    assert (summary["loss"], summary["held"]) == (9.0, False)
    assert trainer.memory.held  # none of which does better
    assert returns(trainer.folder.path) == []


def test_without_an_anneal_there_is_no_second_one(tmp_path: Path) -> None:
    """And the summary is that of the newest checkpoint."""
    trainer = start(tmp_path, train__checkpoint_every=5, train__cooldown=0, train__log_every=1)
    spoil_when_new(trainer)
    summary = trainer.run()
    run = trainer.folder.path
    assert trainer.memory.again_at is None
    assert summary["held"]
    found = newest(run)
    assert found.name == f"step-{summary['steps']:08d}"
    model = checkpoint.load_model(run)
    batches = trainer.config.train.final_batches
    assert evaluate(model, trainer.config, batches, "cpu")[0] == summary["loss"]


def test_a_rank_that_is_lost_at_the_end_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(tmp_path, train__checkpoint_every=5)
    spoil_ends(trainer)

    def lost(*_: Any) -> Any:
        raise RankLost("rank 1 is gone")

    honest = Team.lead

    def lead(team: Team, work: Callable[[], Any]) -> Any:
        asked_for = work.__qualname__.startswith("RunState._found")
        return lost() if asked_for and trainer.compressor.steps == 40 else honest(team, work)

    monkeypatch.setattr(Team, "lead", lead)
    with pytest.raises(RankLost):
        trainer.run()
    assert not (trainer.folder.path / "summary.json").exists()


def test_the_state_that_is_left_is_gone_before_the_other_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or going back would want the memory of two."""
    trainer = start(tmp_path)
    left, alive, take = weakref.ref(trainer.compressor), [], trainer._step

    def one() -> Any:
        event = take()
        if trainer.compressor.steps == 20:
            trainer.compressor.optimizer.store.weight.fill_(math.nan)
        return event

    taking = RunState._take_up

    def look(state: RunState, model: Transformer) -> None:
        alive.append(left() is not None)
        taking(state, model)

    monkeypatch.setattr(trainer, "_step", one)
    monkeypatch.setattr(RunState, "_take_up", look)
    trainer.run()
    assert alive == [False]


def test_a_damaged_checkpoint_is_out_of_the_way_once_it_was_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among the newest few it would cost a sound one its place."""
    poison(monkeypatch, range(22, 27))
    trainer = start(tmp_path, train__skip_limit=5)
    take = trainer._step

    def one() -> Any:
        if trainer.compressor.steps == 23:
            (trainer.folder.checkpoints / "step-00000020" / "model.safetensors").write_bytes(b"")
        return take()

    monkeypatch.setattr(trainer, "_step", one)
    trainer.run()
    assert returns(trainer.folder.path) == [(30, 10)]
    assert (trainer.folder.checkpoints / "step-00000020.damaged").exists()


def test_a_work_target_that_was_met_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two targets the other one is missed: no model twice the size was asked for."""
    changes = {"train__checkpoint_every": 5, "train__log_every": 1, "target__fma": 400.0}
    changes |= {"train__saturation": 10, "train__cooldown": 0}
    forgetful(monkeypatch, 10**9)
    summary = read(finish(tmp_path, **changes) / "summary.json")
    assert not summary["held"]
    assert summary["fma_final"] <= 400


@pytest.mark.parametrize("where", ["check_manifest", "_write"])
def test_a_stop_while_the_way_on_is_sought_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Neither to the checkpoint that is looked at then, nor to the one that is written."""
    whole = start(tmp_path, "whole", train__checkpoint_every=5)
    spoil_ends(whole)
    whole.run()
    trainer = start(tmp_path, train__checkpoint_every=5)
    spoil_ends(trainer)
    honest, sent = getattr(checkpoint, where), []

    def disturbed(*arguments: Any) -> Any:
        if trainer.compressor.steps == 50 and not sent:
            sent.append(1)
            signal.raise_signal(signal.SIGTERM)
        return honest(*arguments)

    monkeypatch.setattr(checkpoint, where, disturbed)
    with pytest.raises(Stopped) as told:
        trainer.run()
    assert told.value.exit_code == 143
    again = start(tmp_path, existing="resume", train__checkpoint_every=5)
    spoil_ends(again)
    again.run()
    assert_same_run(whole.folder.path, again.folder.path)


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


def spoil_when_new(trainer: Trainer) -> None:
    """Spoil the weights after step 38, whatever compressor is at work then."""
    take: Callable[[], Any] = trainer._step

    def one() -> Any:
        event = take()
        if trainer.compressor.steps == 38:
            trainer.compressor.optimizer.store.weight.mul_(100)
        return event

    trainer._step = one  # type: ignore[method-assign]
