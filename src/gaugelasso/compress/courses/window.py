"""What is known of a run's loss: its mean, its noise, and the final loss to aim at."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

# Losses that the present loss is a mean of, and those that its noise is measured on.
WINDOW, NOISE_WINDOW = 33, 60
# The final loss is aimed at this many standard errors below the target, within these shares.
ERRORS, LEAST_ROOM, MOST_ROOM = 3.0, 0.01, 0.18


class Measured(NamedTuple):
    """Loss and metric on selection data, and the standard error of the loss if it is known."""

    loss: float
    metric: float
    error: float = 0.0


@dataclass(kw_only=True)
class LossWindow:
    """Takes in the losses of training; `named` is the loss that the final model must have."""

    named: float
    recent: list[float] = field(default_factory=list)
    first_loss: float | None = None
    # Losses that the next `observe` takes in with its own.
    deferred: list[float] = field(default_factory=list)
    # The standard error of the last measurement on selection data; 0 if it is not known.
    error: float = 0.0

    def seen(self, measured: Measured) -> None:
        """Take in a measurement on selection data."""
        if 0 < measured.error < math.inf:
            self.error = measured.error

    def observe(self, losses: Sequence[float]) -> None:
        """Take in the training losses of the last steps."""
        self.defer(losses)
        if self.first_loss is None and self.deferred:
            self.first_loss = self.deferred[0]
        self.recent = [*self.recent, *self.deferred][-NOISE_WINDOW:]
        self.deferred = []

    def defer(self, losses: Sequence[float]) -> None:
        """Keep losses for the next `observe`: until then they decide nothing."""
        self.deferred = [*self.deferred, *(loss for loss in losses if math.isfinite(loss))]

    @property
    def loss(self) -> float:
        """The present training loss: a mean over the last steps."""
        return statistics.fmean(self.recent[-WINDOW:]) if self.recent else math.inf

    @property
    def aim(self) -> float:
        """The final loss that is aimed at: below the target by the noise of a measurement.

        Selection data and other data that the model is not trained on differ by this noise too.
        """
        return _below(self.named, max(_room(tuple(self.recent)), self._errors(self.named)))

    @property
    def sure(self) -> float:
        """A loss on selection data at which other data have the target loss as well."""
        return self._surely(self.named)

    def _surely(self, named: float) -> float:
        """Below a loss by the standard errors of a measurement."""
        return _below(named, self._errors(named))

    def _errors(self, named: float) -> float:
        """The standard errors to stay below a loss, as a share of it."""
        return ERRORS * self.error / abs(named) if named else 0.0


def _below(named: float, share: float) -> float:
    """Below a loss by a share of its size."""
    return named if math.isinf(named) else named - abs(named) * min(share, MOST_ROOM)


@lru_cache(maxsize=1)  # asked before each step, while the losses change only when they are read
def _room(losses: tuple[float, ...]) -> float:
    """The share of the target loss to stay below it."""
    logs = [math.log(max(loss, 1e-12)) for loss in losses]
    # By differences, so that a falling loss is not taken for noise.
    steps = [b - a for a, b in itertools.pairwise(logs)]
    noise = statistics.pstdev(steps) / math.sqrt(2) if steps else 0.0
    return max(ERRORS * noise / math.sqrt(WINDOW), LEAST_ROOM)
