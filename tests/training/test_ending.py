"""Ends that miss the target: a run ends on the smallest state that holds it."""

import math
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.compress.courses.window import Measured
from gaugelasso.compress.result import TargetMissed
from gaugelasso.distributed import RankLost, Team
from gaugelasso.models import Transformer
from gaugelasso.runs import checkpoint
from gaugelasso.signals import Stopped
from gaugelasso.tasks import SELECTION, TEST, Draw, Retrieval
from gaugelasso.training.evaluation import evaluate
from gaugelasso.training.state import RunState
from tests.tiny_runs import assert_same_run, finish, newest, read, start, start_at
from tests.training.spoilers import (
    damage,
    poison,
    returns,
    rollback_of,
    spoil,
    spoil_ends,
    spoil_when_new,
)

LATE = 33  # a step of the tiny run after which something happens to its end


def test_the_end_is_the_smallest_state_that_held(tmp_path: Path) -> None:
    """A run that cannot anneal has tried the last that held; as it was, it is still the one."""
    for seed in (3, 8):
        changes = {"train__checkpoint_every": 5, "compress__trust": 1.2, "train__seed": seed}
        trainer = start(tmp_path, f"seed{seed}", **changes)
        spoil_ends(trainer)
        summary = trainer.run()
        run = trainer.folder.path
        assert rollback_of(trainer).ended_at is not None
        held, fma = checkpoint.load_state(run)[0]["held"], summary["fma_final"]
        assert held[str(summary["held_step"])] == fma
        assert summary["held"]
        for step, size in held.items():
            if size < fma or (size == fma and int(step) > summary["held_step"]):
                found = checkpoint.at_step(trainer.folder.checkpoints, int(step))
                loss = evaluate(found.model(), trainer.config, 2, "cpu").loss
                assert loss > summary["loss_target"]


def forgetful(monkeypatch: pytest.MonkeyPatch, fewer_than: int) -> None:
    """Models with so few parameters do worse on held-out data."""

    def worse(model: Transformer, *rest: Any) -> Measured:
        found = evaluate(model, *rest)
        forgotten = sum(p.numel() for p in model.parameters()) < fewer_than
        return found._replace(loss=found.loss + forgotten)

    for room in ("trainer", "evaluation"):
        monkeypatch.setattr(f"gaugelasso.training.{room}.evaluate", worse)


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
    for step, fma in rollback_of(trainer).held.items():
        if fma < summary["fma_final"]:  # missed, for having too few
            model = checkpoint.at_step(trainer.folder.checkpoints, step).model()
            assert sum(p.numel() for p in model.parameters()) < few
    assert newest(trainer.folder.path).name == "step-00000040"


def test_states_are_judged_as_the_end_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a task brings its own loss over all held-out data, by that one."""
    figures = {"loss": 9.0}
    trainer = start_at(tmp_path, LATE, train__checkpoint_every=5)
    monkeypatch.setattr("gaugelasso.training.evaluation.final_figures", lambda *_: dict(figures))
    summary = trainer.run()
    assert (summary["loss"], summary["held"]) == (9.0, False)
    assert rollback_of(trainer).held  # none of which does better
    assert returns(trainer.folder.path) == []


def test_selection_data_decide_and_test_data_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worse on test data alone, a model is missed but nothing is decided by it."""
    streams: list[int] = []

    def worse(*words: Any) -> Measured:
        streams.append(words[-1])
        return Measured(9.0, 0.1) if words[-1] == TEST else Measured(1.0, 0.9)

    trainer = start_at(tmp_path, LATE, train__checkpoint_every=5)
    monkeypatch.setattr("gaugelasso.training.evaluation.evaluate", worse)
    summary = trainer.run()
    assert streams == [SELECTION, TEST]
    assert (summary["loss"], summary["held"], summary["metric"]["value"]) == (9.0, False, 0.1)
    assert (summary["selection_loss"], summary["evaluated_on"]) == (1.0, "test")
    assert returns(trainer.folder.path) == []


def test_test_data_are_read_once_and_only_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the run ends on an earlier state, or anneals a second time."""
    honest, read_at = Retrieval.batch, []
    trainer = start_at(tmp_path, LATE, train__checkpoint_every=5)
    spoil_ends(trainer)

    def batch(task: Retrieval, size: int, draw: Draw, device: str) -> Any:
        if draw.stream == TEST:
            read_at.append(trainer.compressor.steps)
        return honest(task, size, draw, device)

    monkeypatch.setattr(Retrieval, "batch", batch)
    summary = trainer.run()
    assert returns(trainer.folder.path)
    assert read_at == [summary["steps"]] * trainer.config.train.final_batches


def test_without_an_anneal_there_is_no_second_one(tmp_path: Path) -> None:
    """And the summary is that of the newest checkpoint."""
    trainer = start(tmp_path, train__checkpoint_every=5, train__cooldown=0, train__log_every=1)
    spoil_when_new(trainer)
    summary = trainer.run()
    run = trainer.folder.path
    assert not rollback_of(trainer).second_anneal_steps
    assert summary["held"]
    found = newest(run)
    assert found.name == f"step-{summary['steps']:08d}"
    model = checkpoint.load_model(run)
    batches = trainer.config.train.final_batches
    loss = evaluate(model, trainer.config, batches, "cpu", stream=TEST).loss
    assert loss == summary["loss"]


def test_a_rank_that_is_lost_at_the_end_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start_at(tmp_path, LATE, train__checkpoint_every=5)
    spoil_ends(trainer)

    def lost(*_: Any) -> Any:
        raise RankLost("rank 1 is gone")

    honest = Team.on_rank0

    def lead(team: Team, work: Callable[[], Any]) -> Any:
        asked_for = work.__qualname__.startswith("RunCheckpoints._found")
        return lost() if asked_for and trainer.compressor.steps == 40 else honest(team, work)

    monkeypatch.setattr(Team, "on_rank0", lead)
    with pytest.raises(RankLost):
        trainer.run()
    assert not (trainer.folder.path / "summary.json").exists()


def test_the_state_that_is_left_is_gone_before_the_other_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or going back would want the memory of two."""
    trainer = start_at(tmp_path, 18)
    left, alive, take = weakref.ref(trainer.compressor), [], trainer._step

    def one() -> Any:
        event = take()
        if trainer.compressor.steps == 20:
            trainer.compressor.optimizer.store.weight.fill_(math.nan)
        return event

    taking = RunState._set_model

    def look(state: RunState, model: Transformer) -> None:
        alive.append(left() is not None)
        taking(state, model)

    monkeypatch.setattr(trainer, "_step", one)
    monkeypatch.setattr(RunState, "_set_model", look)
    trainer.run()
    assert alive == [False]


def test_a_damaged_checkpoint_is_out_of_the_way_once_it_was_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among the newest few it would cost a sound one its place."""
    poison(monkeypatch, range(22, 27))
    trainer = start(tmp_path, train__skip_limit=5)
    damage(trainer, 23, lambda rollback: [20])
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


def test_a_work_target_is_met_by_a_structure_that_holds(tmp_path: Path) -> None:
    """A row of steps before the cut says nothing of it: the cut of step 25 costs the target."""
    changes = {"train__checkpoint_every": 5, "target__fma": 400.0, "train__steps": 80}
    plain = read(finish(tmp_path, "plain", **changes) / "summary.json")
    assert (plain["structure_step"], plain["frozen_step"], plain["steps"]) == (25, 30, 40)
    trainer = start(tmp_path, train__patience=10, **changes)
    spoil(trainer, at=25)
    summary = trainer.run()
    assert returns(trainer.folder.path)[0] == (35, 20)
    assert summary["held"]
    assert summary["fma_final"] <= 400


@pytest.mark.parametrize(("damaged", "back"), [((), [(40, 30)]), ((25, 30), [])])
def test_a_second_anneal_keeps_the_work_target(
    tmp_path: Path, damaged: tuple[int, ...], back: list[tuple[int, int]]
) -> None:
    """It begins where the first one did. Where that is no more, nor another that is small enough,
    the loss target is missed, and said to be.
    """
    changes = {"train__checkpoint_every": 5, "target__fma": 400.0, "train__saturation": 10}
    trainer = start_at(tmp_path, 31, train__steps=80, **changes)
    spoil(trainer, at=31)
    damage(trainer, 33, lambda rollback: damaged)
    summary = trainer.run()
    assert 20 in rollback_of(trainer).held  # larger
    assert returns(trainer.folder.path) == back
    assert summary["held"] == bool(back)
    assert summary["fma_final"] <= 400


def test_a_second_anneal_is_as_long_as_the_first(tmp_path: Path) -> None:
    """Which was no saturation, as the work target was never met."""
    changes = {"train__checkpoint_every": 5, "train__cooldown": 20, "train__saturation": 2}
    trainer = start(tmp_path, train__steps=50, target__fma=11.0, **changes)
    spoil(trainer, at=48)
    with pytest.raises(TargetMissed, match=r"target\.fma = 11 was not reached in 70 steps"):
        trainer.run()


@pytest.mark.parametrize(("at", "held"), [(115, 110), (117, 110), (120, 115)])
def test_a_target_first_held_in_the_cooldown_counts(tmp_path: Path, at: int, held: int) -> None:
    """Lost in the end, behind a checkpoint, between two, or with the last step."""
    changes: dict[str, Any] = {"train__cooldown": 70, "train__warmup": 20, "train__batch": 16}
    changes |= {"target__loss": 0.45, "compress__lr": 0.02, "train__checkpoint_every": 5}
    changes |= {"train__steps": 120}
    trainer = start_at(tmp_path, 112, **changes)
    spoil(trainer, at=at)
    summary = trainer.run()
    assert returns(trainer.folder.path) == [(120, held)]
    assert summary["held"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose ends all fail, so that it seeks a way on."""
    folder = tmp_path_factory.mktemp("undisturbed")
    trainer = start_at(folder, LATE, train__checkpoint_every=5)
    spoil_ends(trainer)
    trainer.run()
    return trainer.folder.path


@pytest.mark.parametrize("where", ["check_manifest", "_write"])
def test_a_stop_while_the_way_on_is_sought_is_no_damage(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Neither to the checkpoint that is looked at then, nor to the one that is written."""
    trainer = start_at(tmp_path, LATE, train__checkpoint_every=5)
    spoil_ends(trainer)
    honest, sent = getattr(checkpoint, where), []

    def disturbed(*arguments: Any) -> Any:
        if trainer.compressor.steps == 50 and not sent:
            sent.append(1)
            signal.raise_signal(signal.SIGTERM)
        return honest(*arguments)

    monkeypatch.setattr(checkpoint, where, disturbed)
    with pytest.raises(Stopped) as error:
        trainer.run()
    assert error.value.exit_code == 143
    again = start(tmp_path, existing="resume", train__checkpoint_every=5)
    spoil_ends(again)
    again.run()
    assert_same_run(undisturbed, again.folder.path)
