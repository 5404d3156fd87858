"""The course of a run that names a metric: the loss that it needs is estimated on the way.

A run that has a target loss as well presses towards it until measurements ask for less.

The estimate may be far off until the metric is met for the first time, which is often late in the
last anneal. So states of several sizes are kept while the model shrinks, to return to.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gaugelasso.compress.amounts import amount
from gaugelasso.compress.courses.course import TIGHTER, Answer, Course, Measure
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.compress.courses.state import is_number
from gaugelasso.compress.courses.window import Measured

# Before the first trial, selection data are measured once in so many hundredths of all steps.
MEASURED = 4
# A state of the first descent is kept each time that the work has fallen by this factor: the last
# `RUNGS` of them.
RUNG, RUNGS = 1.2, 3
# At this share of the last anneal, a loss above the pressed one by this factor is out of reach, and
# the run anneals a larger state. Only for a metric: in runs with a target loss, most of those that
# this would give up reach it in the end.
LOOK, FAR = 0.4, 1.5


@dataclass(kw_only=True)
class MetricCourse(Course):
    """`goal` is the metric to reach; `named` is the present estimate of the loss for it.

    After each measurement `loss <= named` exactly if the metric is met, and the goal's own loss if
    it has one, so what a course does with a target loss holds for both.
    """

    named: float = 0.0  # not known, unless the goal has a loss
    goal: MetricTarget
    pairs: list[tuple[float, bool]] = field(default_factory=list)
    last_metric: float | None = None
    # States of the first descent, as step and FMA; whether the last anneal returned to one of them.
    rungs: list[tuple[int, float]] = field(default_factory=list)
    given_up: bool = False
    # Less than with a target loss, because one that is only estimated is soon too loose.
    growth: ClassVar[float] = 1.6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.names_loss:
            self.named = self.goal.loss

    @property
    def names_loss(self) -> bool:
        """Whether there is a target loss beside the metric."""
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
        """As of a target loss; before the first trial there are measurements for the estimate."""
        past, now = (each // (MEASURED * self.grain) for each in (self.advanced_at, step))
        if self.stage == "start" and step >= self.warmup and past < now:
            selection_loss(False)
        return super().advance(step, fma, selection_loss)

    def _before_trials(self, step: int, fma: float) -> Answer:
        """Keep states of several sizes in which the first provisional loss is reached."""
        first = self.pressed_loss(step)
        if first is None or self.loss > 1.1 * first:
            return Answer()
        if self.rungs and fma > self.rungs[-1][1] / RUNG:
            return Answer()
        self.rungs = [*self.rungs, (step, fma)][-RUNGS:]
        self.good_at, self.good_fma = step, fma
        return Answer(keep=True)

    def _larger(self, fma: float) -> tuple[int, float] | None:
        """The smallest of the kept states that is clearly larger; None if there is none."""
        return next((rung for rung in reversed(self.rungs) if rung[1] >= RUNG * fma), None)

    def _judge(self, step: int, fma: float, loss: float) -> Answer:
        if self.good_loss is None and (rung := self._larger(fma)) is not None:
            self.good_at, self.good_fma = rung
        return super()._judge(step, fma, loss)

    def _steer_anneal(self, before: int, step: int, fma: float, selection_loss: Measure) -> Answer:
        """As of a target loss, but a model that cannot reach it is given up for a larger one."""
        look = self.began_at + LOOK * (self.ends_at - self.began_at)
        rung = self._larger(fma) if before < look <= step and not self.given_up else None
        if rung is None or self.held_at is not None:
            return super()._steer_anneal(before, step, fma, selection_loss)
        loss, pressed = selection_loss(True), self.pressed_loss(step)
        if pressed is None or loss <= FAR * pressed:
            return super()._steer_anneal(before, step, fma, selection_loss)
        self.given_up = True
        self._enter("anneal", step, self.steps - step)
        self.recent, self.gap = [], None
        reason = f"the last anneal of {amount(fma, self.unit)} is at a loss of {loss:.4g}"
        reason += f", too high for {self.named:g}, so a larger model takes its place"
        return Answer(return_to=rung[0], reason=reason)

    def kept_steps(self) -> list[int]:
        rungs = [] if self.given_up else [step for step, _ in self.rungs]
        return list(dict.fromkeys([*super().kept_steps(), *rungs]))

    def _next_provisional(self, back: bool, missing: float) -> float:
        """As of a target loss, but tighter after a trial that missed the metric and stays.

        Half of a loss that missed the metric is a guess of what meets it, and always in reach. So
        such a trial is no reason to press more loosely: the model learns on at its size.
        """
        wanted = super()._next_provisional(back, missing)
        missed = self.last_metric is None or not self.goal.is_met(self.last_metric)
        if back or not missed or self.named <= 0:
            return wanted
        used = self.trials[-1]["pressed_loss"]
        return min(wanted, max(TIGHTER * used, (used + self.named) / 2))

    def in_doubt(self) -> str | None:
        if super().in_doubt() is None:
            return None
        last, loss = self.trials[-1], self.trials[-1]["selection_loss"]
        above = f", above the named {self.goal.loss:g}," if loss > self.goal.loss else ","
        met = self.last_metric is not None and self.goal.is_met(self.last_metric)
        place = "which meets" if met else "short of"
        shown = None if self.last_metric is None else f"{self.last_metric:.4g}"
        return (
            f"after a trial anneal at step {last['step']:,} of {self.steps:,} the model of "
            f"{amount(last['fma'], self.unit)} has a metric of {shown}, {place} the "
            f"named {self.goal.value:g}; its loss is {loss:.4g}{above} and about "
            f"{self.named:.4g} should do"
        )

    def to_dict(self) -> dict[str, Any]:
        lists = {name: [list(each) for each in getattr(self, name)] for name in ("pairs", "rungs")}
        return {**super().to_dict(), **lists}

    def load_(self, values: Mapping[str, Any]) -> None:
        super().load_(values)
        self._take_over([(loss, met) for loss, met in self.pairs])
        self.rungs = [(step, fma) for step, fma in self.rungs]

    def _is_sound(self, name: str, value: Any) -> bool:
        if name == "rungs":
            return isinstance(value, list) and all(map(self._is_rung, value))
        return MetricTarget.are_pairs(value) if name == "pairs" else super()._is_sound(name, value)

    def _is_rung(self, value: Any) -> bool:
        if not isinstance(value, list) or len(value) != 2:
            return False
        step, fma = value
        return type(step) is int and 0 <= step <= self.steps and is_number(fma)
