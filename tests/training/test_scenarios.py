"""Random failures: spoiled weights, NaN losses, kills and stops in one run, all drawn from a seed.

Whatever happens on the way, a run that was interrupted ends as one that was not, a state that
held the target is not passed over, and a work target that was met stays met.
"""

import contextlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.runs import checkpoint
from gaugelasso.signals import Stopped
from gaugelasso.training.evaluation import evaluate
from gaugelasso.training.trainer import Trainer
from tests.tiny_runs import assert_same_run, read, start, stop_at
from tests.training.spoilers import poison, returns, rollback_of
from tests.trust.traps import Signals

# Seed -> how often its run goes back at least: else the scenarios would show little.
# With and without a work target, checkpoints often and rarely, one to four steps without a loss.
RETURNS = {8: 1, 11: 1, 1: 2}


@dataclass(frozen=True)
class Scenario:
    """Steps at which something happens to a run of sixty steps."""

    spoiled: int
    without_loss: tuple[int, ...]
    kills: tuple[int, ...]
    stops: tuple[int, ...]
    settings: dict[str, Any]

    @classmethod
    def drawn(cls, seed: int) -> "Scenario":
        draw = random.Random(seed)
        first = draw.randrange(22, 50)
        changes = {"train__steps": 60, "train__patience": 5, "train__skip_limit": 3}
        changes |= {"train__checkpoint_every": draw.choice([5, 10]), "train__log_every": 5}
        if draw.random() < 0.5:
            changes |= {"target__fma": 450.0, "train__saturation": 12}
        return cls(
            spoiled=draw.randrange(16, 45),
            without_loss=tuple(range(first, first + draw.choice([1, 3, 4]))),
            # Behind the first checkpoint: before it a run starts over.
            kills=tuple(sorted(draw.sample(range(12, 58), 2))),
            stops=tuple(sorted(draw.sample(range(12, 58), 2))),
            settings=changes,
        )


def spoil_each(trainer: Trainer, at: int) -> None:
    """After this step the weights are multiplied, whichever compressor is at work then."""
    take = trainer._step

    def one() -> Any:
        event = take()
        if trainer.compressor.steps == at:
            trainer.compressor.optimizer.store.weight.mul_(100)
        return event

    trainer._step = one  # type: ignore[method-assign]


def interrupt(trainer: Trainer, kind: str, at: int) -> None:
    """Run `trainer` until it is killed after, or stopped in, step `at`; or to its end before."""
    if kind == "kill":
        with contextlib.suppress(pytest.fail.Exception):  # it ended before
            stop_at(trainer, at)
    else:
        with Signals(at), contextlib.suppress(Stopped):
            trainer.run()
    trainer.folder.close()


def begun(folder: Path, name: str, scenario: Scenario, resume: bool = False) -> Trainer:
    trainer = start(folder, name, "resume" if resume else "refuse", **scenario.settings)
    spoil_each(trainer, scenario.spoiled)
    return trainer


def assert_nothing_passed_over(trainer: Trainer) -> None:
    """A run that misses its target has no state that holds it; a met work target is met still."""
    summary, config = read(trainer.folder.path / "summary.json"), trainer.config
    if summary["selection_loss"] is None or summary["selection_loss"] > config.target.loss:
        for step in rollback_of(trainer).held:
            saved = checkpoint.at_step(trainer.folder.checkpoints, step)
            loss = evaluate(saved.model(), config, config.train.final_batches, "cpu").loss
            assert loss > config.target.loss, step
    if config.target.fma and summary["frozen_step"] is not None:
        assert summary["fma_final"] <= config.target.fma


@pytest.mark.parametrize("seed", RETURNS)
def test_an_interrupted_run_ends_as_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    scenario = Scenario.drawn(seed)
    poison(monkeypatch, scenario.without_loss)
    whole = begun(tmp_path, "whole", scenario)
    whole.run()
    assert len(returns(whole.folder.path)) >= RETURNS[seed]
    assert_nothing_passed_over(whole)
    cuts = [("kill", at) for at in scenario.kills] + [("stop", at) for at in scenario.stops]
    resume = False
    for kind, at in sorted(cuts, key=lambda cut: cut[1]):
        interrupt(begun(tmp_path, "run", scenario, resume), kind, at)
        resume = True
        if (tmp_path / "run" / "summary.json").exists():
            break
    else:
        begun(tmp_path, "run", scenario, resume=True).run()
    assert_same_run(whole.folder.path, tmp_path / "run")
