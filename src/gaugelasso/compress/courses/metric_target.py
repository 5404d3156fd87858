"""Which loss a model needs to meet a metric: an estimate from pairs of both that were measured.

A course presses towards a loss, and the user names a metric. The metric gets better as the loss
falls, so there is a largest loss at which it is met. It lies between the largest loss that met the
metric and the smallest that did not. A loss may be named too: then both must be met, and the named
loss bounds the estimate. Decides by numbers alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# While the metric was never met (or never missed), the loss is this factor below (above) the
# nearest that was measured.
BEYOND = 2.0
# Older pairs are forgotten: they are of other weights.
MOST_PAIRS = 40


@dataclass
class MetricTarget:
    """`value` is the metric to reach, and `loss` the largest loss that may come with it.

    `pairs` are losses, and whether the metric was met there.
    """

    value: float
    lower_is_better: bool = False
    pairs: list[tuple[float, bool]] = field(default_factory=list)
    loss: float = math.inf  # no target loss

    def is_met(self, metric: float) -> bool:
        """Whether a metric is at least as good as the one that is named; NaN is not."""
        return metric <= self.value if self.lower_is_better else metric >= self.value

    def both_met(self, loss: float, metric: float) -> bool:
        """Whether the metric is met, and the loss is within its target if it has one."""
        return self.is_met(metric) and (self.loss == math.inf or loss <= self.loss)

    def see(self, loss: float, metric: float) -> None:
        """Take in a measured pair. Then `loss <= estimate()` exactly if both are met.

        Older pairs that contradict it are dropped: a larger loss that met the metric, where this
        one does not, and the reverse. With noise, the newest measurements decide.
        """
        if not math.isfinite(loss):
            return
        met = self.is_met(metric)
        kept = [(old, was) for old, was in self.pairs if was == met or (old < loss) == (not met)]
        self.pairs = [*kept, (loss, met)][-MOST_PAIRS:]

    def estimate(self) -> float | None:
        """A loss to aim at: between what met the metric and what did not, within the target loss.

        None before any pair, unless there is a target loss.
        """
        estimate = self._between()
        if estimate is None:
            return self.loss if self.loss < math.inf else None
        return min(estimate, self.loss)

    def _between(self) -> float | None:
        """Between the largest loss that met the metric and the smallest that did not."""
        met = max((loss for loss, was in self.pairs if was), default=None)
        missed = min((loss for loss, was in self.pairs if not was), default=None)
        if met is not None and missed is not None:
            positive = met > 0 and missed > 0
            # A loss that can be negative has no geometric mean.
            return math.sqrt(met * missed) if positive else (met + missed) / 2
        if met is not None:
            return met + abs(met) * (BEYOND - 1)
        return None if missed is None else missed - abs(missed) * (1 - 1 / BEYOND)

    @staticmethod
    def are_pairs(values: Any) -> bool:
        """Whether these are pairs as a checkpoint keeps them."""
        return isinstance(values, list) and all(map(_is_pair, values))


def _is_pair(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return False
    loss, met = value
    return type(loss) in (int, float) and abs(loss) <= 1e300 and isinstance(met, bool)
