"""Rollback of a run that follows a course: `target.loss` is the loss of the final model.

The course decides where to return to and when; steps that fail are handled as in every run.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.courses.choice import course_of
from gaugelasso.compress.courses.course import Course, Measure
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.compress.courses.stages import Phase
from gaugelasso.compress.courses.window import Measured
from gaugelasso.config import Config
from gaugelasso.runs.checkpoint import Checkpoint
from gaugelasso.training.answers import Answer, EndOn, ReturnTo, SavedStates, Stay
from gaugelasso.training.phases import NOT_SAVED
from gaugelasso.training.records import RunRecord
from gaugelasso.training.rollback import Rollback
from gaugelasso.training.schedule import Schedule

_logger = logging.getLogger(__name__)


def metric_target(config: Config) -> MetricTarget | None:
    """The metric that the config names, with its direction."""
    if config.target.metric is None:
        return None
    return MetricTarget(config.target.metric, config.task.metric_lower_is_better)


@dataclass
class CourseRollback(Rollback):
    """`held_at` and `held` are the course's own here: states that had the named loss."""

    course: Course = field(metadata=NOT_SAVED, repr=False, kw_only=True)

    @classmethod
    def of(cls, config: Config, states: SavedStates) -> "CourseRollback":
        train = config.train
        course = course_of(
            config.target.named,
            metric_target(config),
            config.target.fma,
            train.steps,
            config.compress.lr,
            warmup=train.warmup,
            anneal=train.cooldown,
            least_rate=train.lr_min,
        )
        return cls(config, states, Schedule.of(config), course=course)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "course": self.course.to_dict()}

    def load_(self, values: Mapping[str, Any]) -> None:
        super().load_(values)
        self.course.load_(values["course"])

    # --- the schedule ---------------------------------------------------------------------

    @property
    def end(self) -> int:
        return self.course.steps if self.ended_at is None else self.ended_at

    def phase(self, step: int) -> Phase:
        return self.course.phase(step)

    def rate(self, step: int) -> float:
        return self.course.rate(step)

    def pressed_loss(self, step: int) -> float | None:
        return self.course.pressed_loss(step)

    def allowance(self, pressed_loss: float) -> float | None:
        return self.course.allowance(pressed_loss)

    def freeze_if_met_(self, compressor: Compressor, record: RunRecord, failing: bool) -> None:
        """Done where the course advances."""

    def freeze_(self, step: int) -> None:
        self.frozen_at = step
        self.course.end_compression(step)

    # --- the four questions ---------------------------------------------------------------

    def observe(self, losses: Sequence[float]) -> None:
        self.course.observe(losses)

    def seen(self, measured: Measured) -> None:
        self.course.seen(measured)

    def course_due(self, step: int) -> bool:
        return self.course.due(step)

    def advance(
        self, compressor: Compressor, failing: bool, measure: Measure
    ) -> tuple[bool, Answer]:
        step, course = compressor.steps, self.course
        if compressor.work_target_met and not failing and self.frozen_at is None:
            self.freeze_(step)
        wanted = course.advance(step, compressor.fma, measure)
        if (doubt := course.in_doubt()) is not None:
            _logger.warning("warning: %s", doubt)
        if course.held_at is not None:
            self.held_at, self.held = course.held_at, {course.held_at: course.held_fma}
        if wanted.return_to is None:
            return wanted.keep, Stay()
        last = course.trials[-1]
        reason = (
            f"a trial anneal of {last['fma']:,.0f} FMA per token led to a loss of "
            f"{last['selection_loss'] or math.inf:.4g}, too high for {course.named:g}"
        )
        saved = self.states.first_intact([wanted.return_to])
        return wanted.keep, ReturnTo(saved, reason) if saved else Stay()

    def is_missed(self, record: RunRecord) -> bool:
        return True

    def after_interval(self, record: RunRecord, pressed: bool) -> Answer:
        return Stay()

    def checkpoint_due(self, record: RunRecord, step: int) -> bool:
        every = self.config.train.checkpoint_every
        return step == self.end or step // every > self.saved_at // every

    def before_save_(self, record: RunRecord, step: int, fma: float) -> None:
        self.saved_at = self.fallback_step = step

    def wanted_steps(self) -> list[int]:
        newest = [] if self.fallback_step is None else [self.fallback_step]
        return newest + self.course.kept_steps()

    def held_steps(self) -> list[int]:
        return self.course.kept_steps()

    def at_end(self, loss: float, record: RunRecord, work_target_met: bool) -> Answer:
        """Where the final model misses the named loss, the run ends on the last that had it."""
        if loss <= self.course.named or self.ended_at is not None:
            return Stay()
        end = self._smallest_that_holds(loss, work_target_met)
        return EndOn(end, f"held-out loss {loss:.4g} after the anneal") if end else Stay()

    def _smallest_that_holds(self, bar: float, work_target_met: bool) -> Checkpoint | None:
        held = [] if self.course.held_at is None else [self.course.held_at]
        saved = self.states.first_intact(self._within_work_target(held, work_target_met))
        if saved is None:
            return None
        found = self.states.measured(saved)
        self.seen(Measured(found.loss, found.metric))
        return saved if found.loss <= self.course.named else None

    def returned_(self, answer: ReturnTo | EndOn, step: int) -> None:
        super().returned_(answer, step)
        # The state returned to was good enough to go on from, which need not mean that it held.
        self.held_at, self.pressure = self.course.held_at, 1.0
