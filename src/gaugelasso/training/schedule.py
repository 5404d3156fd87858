"""Phases and learning rate: warm-up, compression, cooldown.

Warm-up: linear rate, no pressure. Compression: constant rate. Cooldown (the anneal): the
structure is frozen and the rate follows a cosine to its minimum. It starts a fixed number of
steps before the end, or as soon as the work target is met ("saturation").
"""

import math
from dataclasses import dataclass, replace

from gaugelasso.compress.courses.stages import Phase
from gaugelasso.config import Config


@dataclass(frozen=True)
class Schedule:
    steps: int
    warmup: int
    cooldown: int
    saturation: int
    lr: float
    lr_min: float

    @classmethod
    def of(cls, config: Config) -> "Schedule":
        train = config.train
        return cls(
            train.steps,
            train.warmup,
            train.cooldown,
            train.saturation,
            config.compress.lr,
            train.lr_min,
        )

    def end(self, frozen_at: int | None) -> int:
        """The number of steps of the whole run, given when the target froze it."""
        return self.steps if frozen_at is None else frozen_at + self.anneal(frozen_at)

    def anneal(self, frozen_at: int | None) -> int:
        """The number of steps of the anneal; `saturation` 0 means as many as `cooldown`."""
        return self.cooldown if frozen_at is None else self.saturation or self.cooldown

    def again(self, steps: int) -> "Schedule":
        """The schedule of a second anneal, of so many steps."""
        return replace(self, saturation=steps)

    def _anneal_start(self, frozen_at: int | None) -> int:
        return self.steps - self.cooldown if frozen_at is None else frozen_at

    def phase(self, step: int, frozen_at: int | None) -> Phase:
        if step >= self._anneal_start(frozen_at):
            return "cooldown"
        return "warmup" if step < self.warmup else "compression"

    def rate(self, step: int, frozen_at: int | None) -> float:
        """Learning rate of step `step`, counted from 0."""
        start = self._anneal_start(frozen_at)
        if step < start:
            return self.lr * min(1.0, (step + 1) / max(self.warmup, 1))
        through = (step - start) / max(self.end(frozen_at) - start, 1)
        return self.lr_min + (self.lr - self.lr_min) * 0.5 * (1 + math.cos(math.pi * through))
