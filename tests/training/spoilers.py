"""Runs that are made to fail: losses that are no numbers, weights that are spoiled."""

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gaugelasso.tasks import Draw, Retrieval
from gaugelasso.training.pressed_run import PressedRun
from gaugelasso.training.rollback import Rollback
from gaugelasso.training.trainer import Trainer
from tests.tiny_runs import rows

SEED = 3  # of the tiny run


def poison(monkeypatch: pytest.MonkeyPatch, steps: Collection[int]) -> None:
    """The batches of these steps, counted from 0, have no loss."""
    honest = Retrieval.batch

    def batch(self: Retrieval, size: int, of: Draw, device: str) -> tuple[Tensor, Tensor]:
        inputs, targets = honest(self, size, of, device)
        poisoned = any(of == Draw(SEED, step) for step in steps)
        return inputs, torch.full_like(targets, -100) if poisoned else targets

    monkeypatch.setattr(Retrieval, "batch", batch)


def ruin(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, after: int) -> None:
    """From this step on a training loss above 100 is none: a state comes apart by and by."""
    honest = Retrieval.loss

    def loss(self: Retrieval, outputs: Tensor, targets: Tensor) -> Tensor:
        found = honest(self, outputs, targets)
        late = torch.is_grad_enabled() and trainer.compressor.steps >= after
        return found * math.nan if late and float(found.detach()) > 100 else found

    monkeypatch.setattr(Retrieval, "loss", loss)


def rollback_of(trainer: Trainer) -> Rollback:
    """What decides in a pressed run."""
    assert isinstance(trainer.driver, PressedRun)
    return trainer.driver.rollback


def returns(folder: Path) -> list[tuple[int, int]]:
    """When the run went back, and where to."""
    events = rows(folder, "events.jsonl")
    return [(e["step"], e["returned_to"]) for e in events if e["returned_to"] is not None]


def spoil(trainer: Trainer, at: int, factor: float = 100) -> None:
    """After this step, once, the weights are so many times what they were."""
    finish_step = trainer.compressor.finish_step_

    def spoiling() -> Any:
        event = finish_step()
        if trainer.compressor.steps == at:
            trainer.compressor.optimizer.store.weight.mul_(factor)
        return event

    trainer.compressor.finish_step_ = spoiling  # type: ignore[method-assign]


def empty(path: Path) -> None:
    """A checkpoint loses what is in its largest file."""
    (path / "model.safetensors").write_bytes(b"")


def damage(
    trainer: Trainer, after: int, which: Callable[[Rollback], Collection[int | None]]
) -> None:
    """After so many steps the checkpoints of these steps are emptied."""
    take = trainer._step

    def one() -> Any:
        if trainer.compressor.steps == after:
            for step in which(rollback_of(trainer)):
                empty(trainer.folder.checkpoints / f"step-{step:08d}")
        return take()

    trainer._step = one  # type: ignore[method-assign]


def spoil_ends(trainer: Trainer, after: int = 33) -> None:
    """No step after this one, and no anneal, succeeds."""
    take = trainer._step

    def one() -> Any:
        event = take()
        if rollback_of(trainer).frozen_at or trainer.compressor.steps > after:
            trainer.compressor.optimizer.store.weight.mul_(2)
        return event

    trainer._step = one  # type: ignore[method-assign]


def spoil_when_new(trainer: Trainer) -> None:
    """Spoil the weights after step 38, whatever compressor is at work then."""
    take: Callable[[], Any] = trainer._step

    def one() -> Any:
        event = take()
        if trainer.compressor.steps == 38:
            trainer.compressor.optimizer.store.weight.mul_(100)
        return event

    trainer._step = one  # type: ignore[method-assign]
