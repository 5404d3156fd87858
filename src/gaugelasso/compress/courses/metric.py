"""The course of a run that names a metric: the loss that it needs is estimated on the way.

A run that names a loss as well presses towards that one until measurements ask for less.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gaugelasso.compress.courses.course import TIGHTER, Answer, Course, Measure
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.compress.courses.window import Measured

# Before the first trial, selection data are measured once in so many hundredths of all steps.
MEASURED = 4


@dataclass(kw_only=True)
class MetricCourse(Course):
    """`goal` is the metric to reach; `named` is the present estimate of the loss for it.

    After each measurement `loss <= named` exactly if the metric is met, and the goal's own loss if
    it has one, so what a course does with a named loss holds for both.
    """

    named: float = 0.0  # not known, unless the goal has a loss
    goal: MetricTarget
    pairs: list[tuple[float, bool]] = field(default_factory=list)
    last_metric: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.names_loss:
            self.named = self.goal.loss

    @property
    def names_loss(self) -> bool:
        """Whether a loss is named beside the metric."""
        return self.goal.loss < math.inf

    def seen(self, measured: Measured) -> None:
        super().seen(measured)
        self.goal.pairs = self.pairs
        self.goal.see(measured.loss, measured.metric)
        self._take_over(self.goal.pairs)
        self.last_metric = measured.metric if math.isfinite(measured.metric) else None

    @property
    def sure(self) -> float:
        """The noise of the loss is not that of the metric; a loss that is named keeps its own."""
        return min(self.named, self._surely(self.goal.loss))

    def _take_over(self, pairs: list[tuple[float, bool]]) -> None:
        self.pairs = self.goal.pairs = pairs
        estimate = self.goal.estimate()
        self.named = 0.0 if estimate is None else estimate

    def pressed_loss(self, step: int) -> float | None:
        return super().pressed_loss(step) if self.pairs or self.names_loss else None

    def advance(self, step: int, fma: float, selection_loss: Measure) -> Answer:
        """As of a named loss; before the first trial there are measurements for the estimate."""
        past, now = (each // (MEASURED * self.grain) for each in (self.advanced_at, step))
        if self.stage == "start" and step >= self.warmup and past < now:
            selection_loss(False)
        return super().advance(step, fma, selection_loss)

    def _next_provisional(self, back: bool, missing: float) -> float:
        """As of a named loss, but tighter after a trial that missed the metric and stays.

        Half of a loss that missed the metric is a guess of what meets it, and always in reach. So
        such a trial is no reason to press more loosely: the model learns on at its size.
        """
        wanted = super()._next_provisional(back, missing)
        missed = self.last_metric is None or not self.goal.is_met(self.last_metric)
        if back or not missed or self.named <= 0:
            return wanted
        return min(wanted, TIGHTER * self.trials[-1]["pressed_loss"])

    def in_doubt(self) -> str | None:
        if super().in_doubt() is None:
            return None
        last, loss = self.trials[-1], self.trials[-1]["selection_loss"]
        above = f", above the named {self.goal.loss:g}," if loss > self.goal.loss else ","
        met = self.last_metric is not None and self.goal.is_met(self.last_metric)
        place = "which meets" if met else "short of"
        return (
            f"after a trial anneal at step {last['step']:,} of {self.steps:,} the model of "
            f"{last['fma']:,.0f} FMA per token has a metric of {self.last_metric}, {place} the "
            f"named {self.goal.value:g}; its loss is {loss:.4g}{above} and about "
            f"{self.named:.4g} should do"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "pairs": [list(pair) for pair in self.pairs]}

    def load_(self, values: Mapping[str, Any]) -> None:
        super().load_(values)
        self._take_over([(loss, met) for loss, met in self.pairs])

    def _is_sound(self, name: str, value: Any) -> bool:
        return MetricTarget.are_pairs(value) if name == "pairs" else super()._is_sound(name, value)
