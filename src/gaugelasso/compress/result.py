"""What a compression led to. A plain record; computes nothing of its own."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from gaugelasso.compress.amounts import amount, number
from gaugelasso.errors import UserError

# Where the loss of a result was measured.
Place = Literal["held-out data", "the last training batches"]
HELD_OUT: Place = "held-out data"
LAST_BATCHES: Place = "the last training batches"


class TargetMissed(UserError):
    """The final model does not have the loss, metric or work that was named."""


class TargetMissedWarning(UserWarning):
    """The final model does not have the loss, metric or work that was named."""


@dataclass(frozen=True)
class Result:
    """The outcome of a compression: `held` says whether the final model has what was named.

    That is a loss of at most `loss_target`, a metric of at least `metric_target` (at most, where
    lower is better), or both; or a work of at most `fma_target`, alone or with a loss.

    `measured_on` says where `loss` comes from: "held-out data" if the compressor had an
    `evaluate` function, else "the last training batches".
    """

    held: bool
    loss: float
    loss_target: float | None
    measured_on: Place
    steps: int
    fma_initial: float
    fma: float
    parameters_initial: int
    parameters: int
    widths: dict[str, int]
    metric: float | None = None
    metric_target: float | None = None
    metric_held: bool | None = None  # whether the metric alone is as named; None: none is named
    fma_target: float = 0.0  # 0: none
    work_held: bool | None = None  # whether the work alone is as named; None: none is named
    unit: str = "FMA per token"  # of the accounting
    trials: list[dict[str, Any]] = field(default_factory=list, repr=False)

    @property
    def compression(self) -> float:
        """Work per token before, divided by that after."""
        return self.fma_initial / self.fma if self.fma else float("inf")

    def __str__(self) -> str:
        named = [f"loss {self.loss:.4g} on {self.measured_on}"]
        if self.loss_target is not None:
            named[0] += f", named {self.loss_target:g}: {_verdict(self._within_loss)}"
        if self.metric_target is not None:
            metric = f"metric {self.metric:.4g}, named {self.metric_target:g}"
            named += [f"{metric}: {_verdict(self.metric_held)}"]
        if self.fma_target:
            named += [f"work target {self._number(self.fma_target)}: {_verdict(self.work_held)}"]
        return (
            f"{self._number(self.fma_initial)} -> {self._work} ({self.compression:.1f}x), "
            f"{self.parameters_initial:,} -> {self.parameters:,} parameters; {'; '.join(named)}"
        )

    @property
    def _within_loss(self) -> bool:
        return self.loss_target is None or self.loss <= self.loss_target

    @property
    def _work(self) -> str:
        return amount(self.fma, self.unit)

    def _number(self, work: float) -> str:
        return number(work, self.unit)

    def missed_message(self) -> str:
        """What to do about a missed target."""
        if self.metric_target is not None:
            names, remedy = self._missed_of_both(self.metric_target)
            return (
                f"{names} missed: the model of {self._work} "
                f"ends at a metric of {self.metric} and a loss of {self.loss:.4g} "
                f"after {self.steps:,} steps; name {remedy}, or give more steps"
            )
        if self.work_held is False:
            work = f"fma_target = {self._number(self.fma_target)}"
            names, remedy = f"{work} was", "a larger fma_target"
            if not self._within_loss:
                names = f"loss_target = {self.loss_target:g} and {work} were"
                remedy = f"a higher loss and {remedy}"
            return (
                f"{names} missed: the model ends at {self._work} with a loss of {self.loss:.4g} "
                f"after {self.steps:,} steps; name {remedy}, or give more steps"
            )
        losses = [self.loss, *(row["selection_loss"] for row in self.trials)]
        known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        data = self.measured_on if self.measured_on == HELD_OUT else "training data"
        advice = f"No loss on the way was finite; check the {data}"
        if known:
            advice = f"The best loss on the way was {min(known):.4g}; name a loss above that, or "
            advice += "give more steps"
        unchanged = self.fma >= 0.999 * self.fma_initial
        size = "the full model" if unchanged else f"the model of {self._work}"
        return (
            f"loss_target = {self.loss_target:g} was missed: {size} ends at a loss of "
            f"{self.loss:.4g} after {self.steps:,} steps. {advice}"
        )

    def _missed_of_both(self, metric_target: float) -> tuple[str, str]:
        """Of loss and metric those that were missed, with their verb, and what to name instead."""
        metric = f"metric_target = {metric_target:g}"
        if self.loss_target is None or self._within_loss:
            return f"{metric} was", "another metric"
        loss = f"loss_target = {self.loss_target:g}"
        if self.metric_held:
            return f"{loss} was", "a higher loss"
        return f"{loss} and {metric} were", "a higher loss and another metric"


def _verdict(held: bool | None) -> str:
    return "held" if held else "MISSED"
