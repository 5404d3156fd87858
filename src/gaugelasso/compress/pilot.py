"""The pilot: drives a compressor along its course, for a loop that only calls `step`.

Before each step it sets the learning rate, the pressure and the loss to press towards. After it,
it keeps the states that the course wants and returns to them. Knows nothing of files: a `Recorder`
writes what happens.
"""

import logging
import math
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gaugelasso.compress.courses.course import Course
from gaugelasso.compress.courses.metric import MetricCourse
from gaugelasso.compress.courses.stages import TICKS
from gaugelasso.compress.courses.window import Measured
from gaugelasso.compress.events import Event
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.recording import Recorder
from gaugelasso.compress.result import Result, TargetMissedWarning
from gaugelasso.compress.resume_state import ResumeState
from gaugelasso.compress.saved_state import SavedState
from gaugelasso.errors import UserError

if TYPE_CHECKING:
    from gaugelasso.compress.compressor import Compressor

_log = logging.getLogger(__name__)
# So many skipped steps in a row are a failure: the run returns to a state that was kept.
_SKIPPED_IN_A_ROW = 20
# So many returns because of failures, and no more.
_MOST_FAILURES = 3


class Loadable(Protocol):
    """A state that was kept, in memory or on disk."""

    def load_(self, state: ModelState, resume_state: ResumeState) -> None:
        """Put the state back; it can be loaded any number of times."""


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


class Pilot:
    """One run of a compressor: its course, its kept states, its losses."""

    def __init__(
        self,
        compressor: "Compressor",
        course: Course,
        evaluate: Callable[[], Any] | None,
        seconds: float | None = None,
        recorder: Recorder | None = None,
    ):
        self.compressor, self.course, self.recorder = compressor, course, recorder
        self._evaluate, self._seconds = evaluate, seconds
        # The metric that is named, and the last one that was measured.
        self.metric_target = course.goal if isinstance(course, MetricCourse) else None
        self.metric: float | None = None
        self._losses: list[Tensor] = []
        self.kept: dict[int, Loadable] = {}
        self.failures = 0
        self.parameters_initial = compressor.parameters
        self._began: float | None = None
        self._result: Result | None = None
        if recorder is not None:
            recorder.begin(self)

    @property
    def now(self) -> int:
        """Steps taken; with a time budget, the ticks that have passed."""
        if self._seconds is None:
            return self.compressor.steps
        if self._began is None:
            return 0
        passed = (time.monotonic() - self._began) / self._seconds
        return min(int(passed * TICKS), TICKS)

    @property
    def done(self) -> bool:
        return self.now >= self.course.steps

    # --- a step ---------------------------------------------------------------------------

    def before_step(self) -> None:
        """Set rate, pressure and pressed loss of the next step."""
        if self._began is None:
            self._began = time.monotonic()
        if self._result is not None:
            raise UserError("step after finish(): the compression is over")
        now, compressor, course = self.now, self.compressor, self.course
        if self._seconds is None and now >= course.steps:
            raise UserError(
                f"step {now + 1} of {course.steps}: all steps are taken; call finish(), or give "
                "Compressor a larger number of steps"
            )
        pressed = course.pressed_loss(now)
        compressor.set_lr_(course.rate(now))
        compressor.set_pressure_(0.0 if pressed is None else 1.0)
        if pressed is not None:
            compressor.set_loss_target_(pressed, course.allowance(pressed))

    def after_step(self, loss: Tensor, event: Event | None) -> None:
        """Take in a step's loss; at due steps ask the course what to do."""
        self._losses.append(loss.detach())
        if event is not None and self.recorder is not None:
            self.recorder.event(event)
        now = self.now
        if not self.course.due(now):
            return
        losses = self._read_losses()
        self._check_failing()
        if self.compressor.work_target_met:
            self.course.end_compression(now)
        answer = self.course.advance(now, self.compressor.fma, self.selection_loss)
        if (doubt := self.course.in_doubt()) is not None:
            _log.warning("warning: %s", doubt)
        if answer.return_to is not None:
            self.return_to(answer.return_to)
        if self.recorder is not None:
            self.recorder.advanced(losses)
        if answer.keep:  # last: a checkpoint of the kept state has these losses too
            self.keep(now)

    def _read_losses(self) -> list[float]:
        """Take in the losses since the last call."""
        pending = [each.reshape(()).float() for each in self._losses]
        losses = torch.stack(pending).tolist() if pending else []
        self._losses.clear()
        self.course.observe(losses)
        return losses

    def selection_loss(self, thorough: bool = True) -> float:
        """The loss on held-out data; without an `evaluate` function, of the last batches."""
        if self._evaluate is None:
            return self.course.loss
        model = self.compressor.model
        model.eval()
        try:
            with torch.no_grad():
                measured = self._evaluate()
            if self.metric_target is None:
                return float(measured)
            loss, metric = pair_of(measured)
            self.course.seen(Measured(loss, metric))
            self.metric = metric
            return loss
        finally:
            model.train()

    # --- states ---------------------------------------------------------------------------

    def keep(self, name: int) -> None:
        """Keep the present state under this name, and drop those that the course forgot."""
        compressor = self.compressor
        self.kept[name] = SavedState(compressor.state, compressor.resume_state)
        wanted = self.course.kept_steps()
        self.kept = {each: state for each, state in self.kept.items() if each in wanted}
        if self.recorder is not None:
            self.recorder.kept(name)

    def return_to(self, name: int) -> None:
        compressor, began = self.compressor, time.perf_counter()
        fma, skipped = compressor.fma, int(compressor.skipped)
        self.kept[name].load_(compressor.state, compressor.resume_state)
        compressor.scalars.recount_(skipped)
        seconds = time.perf_counter() - began
        event = Event.returned(
            compressor.steps, name, fma, compressor.fma, compressor.widths, seconds
        )
        compressor.history.append(event)
        if self.recorder is not None:
            self.recorder.event(event)

    def _check_failing(self) -> None:
        """Return to a kept state after a long row of skipped steps; UserError if there is none."""
        if int(self.compressor.failing) < _SKIPPED_IN_A_ROW:
            return
        self.failures += 1
        name = self.course.good_at
        if name is None or self.failures > _MOST_FAILURES:
            raise UserError(
                f"loss or gradient is NaN or infinite for {int(self.compressor.failing)} steps in "
                f"a row at step {self.compressor.steps}; lower the learning rate "
                "(options=CompressorOptions(lr=...)), or check the data"
            )
        self.return_to(name)

    # --- the end --------------------------------------------------------------------------

    def finish(self) -> Result:
        """The result; where the final model misses the named loss, of the last state that held."""
        if self._result is not None:
            return self._result
        if not self.done:
            unit = "steps" if self._seconds is None else "ticks"
            warnings.warn(
                f"finish() after {self.now} of {self.course.steps} {unit}: the anneal is not over",
                stacklevel=3,
            )
        self._read_losses()
        loss, held_at = self.selection_loss(), self.course.held_at
        if not self._holds(loss) and held_at in self.kept:
            self.return_to(held_at)
            loss = self.course.held_loss if self._evaluate is None else self.selection_loss()
        self._result = self._measured(loss)
        if not self._result.held:
            warnings.warn(self._result.missed_message(), TargetMissedWarning, stacklevel=3)
        if self.recorder is not None:
            self.recorder.finished(self._result)
        return self._result

    @property
    def loss_target(self) -> float | None:
        """The loss that is named; None if the run names another figure."""
        to_loss = self.metric_target is None and self.course.named < math.inf
        return self.course.named if to_loss else None

    def _holds(self, loss: float) -> bool:
        if self.metric_target is not None:
            return self.metric is not None and self.metric_target.is_met(self.metric)
        to_work = self.loss_target is None
        return self.compressor.work_target_met if to_work else loss <= self.course.named

    def _measured(self, loss: float) -> Result:
        compressor, own = self.compressor, self._evaluate is not None
        return Result(
            held=self._holds(loss),
            loss=loss,
            loss_target=self.loss_target,
            metric=self.metric,
            metric_target=None if self.metric_target is None else self.metric_target.value,
            fma_target=compressor.fma_target,
            measured_on="held-out data" if own else "the last training batches",
            steps=compressor.steps,
            fma_initial=compressor.fma_initial,
            fma=compressor.fma,
            parameters_initial=self.parameters_initial,
            parameters=compressor.parameters,
            widths=compressor.widths,
            trials=list(self.course.trials),
        )
