"""The pilot: drives a compressor along its course, for a loop that only calls `step`.

Adds to the driver what such a loop needs: a clock for a time budget, the user's own measurement on
held-out data, and the result at the end. Knows nothing of files: a `Recorder` writes what happens.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gaugelasso.axes import Compressible
from gaugelasso.compress.course_driver import CourseDriver
from gaugelasso.compress.courses.course import Course
from gaugelasso.compress.courses.metric import MetricCourse
from gaugelasso.compress.courses.window import Measured
from gaugelasso.compress.driver import Log, NoLog
from gaugelasso.compress.events import Event
from gaugelasso.compress.kept_states import StatesInMemory
from gaugelasso.compress.measuring import in_eval_mode, same_gradients, same_random_numbers
from gaugelasso.compress.result import HELD_OUT, LAST_BATCHES, Place, Result, TargetMissedWarning
from gaugelasso.compress.time_budget import TimeBudget
from gaugelasso.errors import UserError

if TYPE_CHECKING:
    from gaugelasso.compress.compressor import Compressor

# So many skipped steps in a row are a failure: the run returns to a state that was kept.
_SKIPPED_IN_A_ROW = 20


def loss_of(measured: Any) -> float:
    """The loss that `evaluate` returned; TypeError if it is no number."""
    try:
        return float(measured)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"evaluate returned {measured!r}; it must return the loss on held-out data, one number"
        ) from None


def pair_of(measured: Any) -> tuple[float, float]:
    """The loss and the metric that `evaluate` returned; TypeError if it did not."""
    try:
        loss, metric = measured
        return float(loss), float(metric)
    except (TypeError, ValueError):
        raise TypeError(
            f"evaluate returned {measured!r}; with metric_target it must return the loss and the "
            "metric, two numbers"
        ) from None


class Recorder(Log, Protocol):
    """Writes what a pilot does, and can bring it back to where an earlier run was stopped."""

    def prepare(self, model: Compressible) -> None:
        """Give the model the state to go on with, before anything is built on it."""

    def begin(self, pilot: "Pilot") -> None:
        """The run starts, or goes on."""

    def finished(self, result: Result) -> None:
        """The run is over."""


class Pilot(CourseDriver):
    """One run of a compressor in a loop of the user's own."""

    def __init__(
        self,
        compressor: "Compressor",
        course: Course,
        evaluate: Callable[[], Any] | None,
        time_budget: TimeBudget | None = None,
        recorder: Recorder | None = None,
    ):
        self.memory = StatesInMemory(compressor)
        log = NoLog() if recorder is None else recorder
        super().__init__(course, self.memory, self._measured, log, _SKIPPED_IN_A_ROW)
        self.recorder = recorder
        self._evaluate, self._time = evaluate, time_budget
        # The metric that is named, and the last one that was measured.
        self.metric_target = course.goal if isinstance(course, MetricCourse) else None
        self.metric: float | None = None
        self.parameters_initial = compressor.parameters
        self._result: Result | None = None
        self._evaluate_tried = evaluate is None
        if recorder is not None:
            recorder.begin(self)

    @property
    def now(self) -> int:
        """Steps taken; with a time budget, the ticks that have passed."""
        return self.compressor.steps if self._time is None else self._time.ticks

    @property
    def steps_left(self) -> float:
        if self._time is None:
            return super().steps_left
        return self.compressor.steps * (self.end - self.now) / self.now if self.now else math.inf

    @property
    def timed(self) -> bool:
        """Whether the run has a time budget, not a number of steps."""
        return self._time is not None

    @property
    def done(self) -> bool:
        return self.now >= self.end

    # --- a step ---------------------------------------------------------------------------

    def before_step(self) -> None:
        """Set rate, pressure and pressed loss of the next step; UserError if there is none."""
        if self._result is not None:
            raise UserError("step after finish(): the compression is over")
        if self.ended_at is not None:
            raise UserError(
                f"steps fail again and again, so that the run has ended at step "
                f"{self.compressor.steps} on a state that has what is named; call finish()"
            )
        if self._time is None and self.now >= self.course.steps:
            raise UserError(
                f"step {self.now + 1} of {self.course.steps}: all steps are taken; call finish(), "
                "or give Compressor a larger number of steps"
            )
        if not self._evaluate_tried:
            self._try_evaluate()
        if self._time is not None:
            self._time.start()
        super().before_step()

    def _try_evaluate(self) -> None:
        """Call `evaluate` once before the first step: its first mistake else ends a long run."""
        metric, compressor = self.metric, self.compressor
        device = compressor.optimizer.store.weight.device
        with same_random_numbers(device), same_gradients(compressor.model):
            loss = self._measured(thorough=False).loss
        self.metric = metric  # of this call nothing is used
        if math.isnan(loss):
            raise UserError(
                "evaluate returned a loss of NaN before the first step; check the held-out data"
            )
        self._evaluate_tried = True

    def after_step(self, loss: Tensor, event: Event | None) -> None:
        """Take in a step's loss; at due steps ask the course what to do."""
        self.note_step(loss, event)
        self.advance()

    def decide(self, due: bool) -> bool:
        if due and self._time is not None and self._time.chooses_interval:
            self._set_interval(self._time.interval(self.compressor.steps))
            # Events come after the warm-up; by then the time of a step is known well enough.
            self._time.chooses_interval = self.now < self.course.warmup
        return super().decide(due)

    def _set_interval(self, interval: int) -> None:
        compressor = self.compressor
        compressor.options = replace(compressor.options, interval=interval)
        compressor.scalars.set_norm_rate_(compressor.options.step_norm_rate)

    def where(self) -> str:
        return f"for {self.streak} steps in a row at step {self.compressor.steps}"

    def _measured(self, thorough: bool) -> Measured:
        """Of held-out data; without an `evaluate` function, of the last batches."""
        if self._evaluate is None:
            return Measured(self.course.loss, math.nan)
        with in_eval_mode(self.compressor.model), torch.no_grad():
            measured = self._evaluate()
        if self.metric_target is None:
            return Measured(loss_of(measured), math.nan)
        loss, self.metric = pair_of(measured)
        return Measured(loss, self.metric)

    # --- the end --------------------------------------------------------------------------

    def finish(self) -> Result:
        """The result; where the final model misses the target loss, of the last state that held."""
        if self._result is not None:
            return self._result
        if not self.done:
            taken = f"{self.now} of {self.course.steps} steps"
            if self._time is not None:
                taken = f"{self.now / self.course.steps:.0%} of the time that `seconds` names"
            warnings.warn(f"finish() after {taken}: the anneal is not over", stacklevel=3)
        self.read_losses()
        measured = self._measured(thorough=True)
        if (end := self.at_end(measured)) is not None:
            end()
        # Without an `evaluate` function, only the course knows the loss of a state that it kept.
        if self.ended_at is not None:
            known = Measured(self.course.held_loss, math.nan)
            measured = known if self._evaluate is None else self._measured(thorough=True)
        self._result = self._result_of(measured.loss)
        if not self._result.held:
            warnings.warn(self._result.missed_message(), TargetMissedWarning, stacklevel=3)
        if self.recorder is not None:
            self.recorder.finished(self._result)
        return self._result

    @property
    def measured_on(self) -> Place:
        """What the loss is measured on that decides."""
        return LAST_BATCHES if self._evaluate is None else HELD_OUT

    @property
    def loss_target(self) -> float | None:
        """The loss that is named; None if the run names no loss."""
        reach = self.metric_target
        named = self.course.named if reach is None else reach.loss
        return named if named < math.inf else None

    def _metric_held(self) -> bool | None:
        """Whether the last metric that was measured is as named; None if none is named."""
        if self.metric_target is None:
            return None
        return self.metric is not None and self.metric_target.is_met(self.metric)

    def _holds(self, loss: float) -> bool:
        if (metric_held := self._metric_held()) is not None:
            return metric_held and (self.loss_target is None or loss <= self.loss_target)
        within = self.loss_target is None or loss <= self.course.named
        return within and (not self.compressor.fma_target or self.compressor.work_target_met)

    def _result_of(self, loss: float) -> Result:
        compressor = self.compressor
        return Result(
            held=self._holds(loss),
            loss=loss,
            loss_target=self.loss_target,
            metric=self.metric,
            metric_target=None if self.metric_target is None else self.metric_target.value,
            metric_held=self._metric_held(),
            fma_target=compressor.fma_target,
            work_held=compressor.work_target_met if compressor.fma_target else None,
            unit=compressor.state.cost_model.unit,
            measured_on=self.measured_on,
            steps=compressor.steps,
            fma_initial=compressor.fma_initial,
            fma=compressor.fma,
            parameters_initial=self.parameters_initial,
            parameters=compressor.parameters,
            widths=compressor.widths,
            trials=list(self.course.trials),
        )
