"""What a run remembers beside tensors: the numbers that a checkpoint keeps for the trainer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Of the checkpoints that held the target one stays of every size, and a size is this many times
# the next smaller one: together they take no more room than a few of the largest.
RUNG = 1.5

# Keys of checkpoints written before version 0.3, by their present names.
_FORMER_KEYS = {
    "hoped_at": "pending_step",
    "hoped_fma": "pending_fma",
    "good_at": "fallback_step",
    "tried_at": "last_return_step",
    "in_vain": "failed_returns",
    "again_for": "second_anneal_steps",
    "off_for": "steps_off_target",
}


def present_keys(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's values under today's names, whichever version wrote them."""
    return {_FORMER_KEYS.get(key, key): value for key, value in state.items()}


@dataclass
class Memory:
    """As a run begins. Names that end in `_at` or `_step` are steps."""

    frozen_at: int | None = None
    reached_at: int | None = None  # the first loss within its target
    first_loss: float | None = None
    best_loss: float | None = None  # the least mean of a row
    loss: float | None = None  # mean of the last row; None where no step of it had a loss
    metric: float | None = None
    unlogged: list[float] = field(default_factory=list)
    training_fma: float = 0.0
    wall_s: float = 0.0
    fma_initial: float = 0.0
    parameters_initial: int = 0
    cut_at: int = 0  # when the structure became what it is
    row_at: int = 0  # where the last row began
    open_at: int = 0  # and where the one after it did
    saved_at: int = 0  # the last checkpoint that was due
    fallback_step: int | None = None  # where to go back to when steps fail
    pending_step: int | None = None  # held the target, not yet confirmed
    pending_fma: float = 0.0
    held_at: int | None = None  # the last one that did hold it
    held_before_at: int | None = None  # and the one before that
    held: dict[int, float] = field(default_factory=dict)  # these and older ones: step -> FMA
    last_return_step: int | None = None  # of these, the one that was last gone back to
    ended_at: int | None = None  # when the run took up a held state as its last
    second_anneal_steps: int = 0  # the steps of a second anneal, once there is one
    steps_off_target: int = 0  # steps since the loss left its target
    returns: int = 0
    failed_returns: int = 0  # of these, since a step was last taken
    skipped: int = 0

    def __post_init__(self) -> None:
        self.held = {int(step): fma for step, fma in self.held.items()}  # text in a checkpoint

    def hear_(self, losses: Sequence[float], steps: int, target: float) -> None:
        """Take in the losses of the last steps of `steps`."""
        numbered = enumerate(losses, steps - len(losses) + 1)
        sound = [(step, loss) for step, loss in numbered if math.isfinite(loss)]
        if self.reached_at is None:
            self.reached_at = next((step for step, loss in sound if loss <= target), None)
        if self.first_loss is None and sound:
            self.first_loss = sound[0][1]
        self.unlogged = [*self.unlogged, *(loss for _, loss in sound)]

    def close_row_(self, step: int) -> None:
        """The losses since the last row become the mean of one that ends with this step."""
        self.row_at, self.open_at = self.open_at, step
        self.loss = sum(self.unlogged) / len(self.unlogged) if self.unlogged else None
        if self.loss is not None:
            self.best_loss = self.loss if self.best_loss is None else min(self.best_loss, self.loss)
        self.unlogged = []

    def holds(self, target: float) -> bool:
        """Whether the last row's loss is within its target."""
        return self.loss is not None and self.loss <= target

    def hold_(self, step: int, fma: float) -> None:
        """A checkpoint held the target. It stays on record, with the smallest of every size.

        Of the smallest the first stays, too: held-out data may like the last one less.
        """
        self.held_before_at, self.held_at = self.held_at, step
        every = {**self.held, step: fma}
        least = min(every.values())
        first = min(each for each, size in every.items() if size == least)
        last = self.held_before_at, self.held_at, first
        seen, kept = set(), {}
        for each, size in sorted(every.items(), key=lambda held: (held[1], -held[0])):
            rung = math.floor(math.log(size, RUNG)) if size > 0 else None
            if rung not in seen or each in last:
                kept[each] = size
            seen.add(rung)
        self.held = kept
