"""What a run remembers beside tensors: the numbers that a checkpoint keeps for the trainer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Memory:
    """As a run begins. Names that end in `_at` are steps."""

    frozen_at: int | None = None
    reached_at: int | None = None  # the first loss within its target
    first_loss: float | None = None
    best_loss: float = math.inf
    loss: float | None = None  # mean of the last row
    metric: float | None = None
    unlogged: list[float] = field(default_factory=list)
    training_fma: float = 0.0
    wall_s: float = 0.0
    fma_initial: float = 0.0
    parameters_initial: int = 0
    cut_at: int = 0  # when the structure became what it is
    hoped_at: int | None = None  # a checkpoint that held the target: the steps after it will tell
    held_at: int | None = None  # the last one that did hold it
    held_before_at: int | None = None  # and the one before that
    tried_at: int | None = None  # of these, the one that was last gone back to
    ended_at: int | None = None  # when the run took up a held state as its last
    again_at: int | None = None  # when a second anneal began
    off_for: int = 0  # steps since the loss left its target
    returns: int = 0
    in_vain: int = 0  # of these, since a step was last taken
    skipped: int = 0

    def hear_(self, losses: Sequence[float], steps: int, target: float) -> None:
        """Take in the losses of the last steps of `steps`."""
        for step, loss in enumerate(losses, steps - len(losses) + 1):
            self.best_loss = min(self.best_loss, loss)  # nan is never less
            if self.reached_at is None and loss <= target:
                self.reached_at = step
        sound = [loss for loss in losses if math.isfinite(loss)]
        if self.first_loss is None and sound:
            self.first_loss = sound[0]
        self.unlogged = [*self.unlogged, *sound]

    def close_row_(self) -> None:
        """The losses since the last row become its mean."""
        if self.unlogged:
            self.loss = sum(self.unlogged) / len(self.unlogged)
        self.unlogged = []

    def holds(self, target: float) -> bool:
        """Whether the last row's loss is within its target."""
        return self.loss is not None and self.loss <= target
