"""The driver of a run along a course, in a loop of the user's own and in the trainer.

The course decides by numbers. This carries it out: it keeps the states that the course wants,
returns to them, also where steps fail, and chooses the state that the run ends on.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gaugelasso.compress.courses.course import Course
from gaugelasso.compress.courses.window import Measured
from gaugelasso.compress.driver import TRIES, Driver, Log
from gaugelasso.compress.kept_states import States
from gaugelasso.errors import UserError

if TYPE_CHECKING:
    from gaugelasso.compress.compressor import Compressor

_logger = logging.getLogger(__name__)


class CourseDriver(Driver):
    """`measure(thorough)` measures the present model on selection data.

    Fields that end in `_at` or `_step` are points of the course. A checkpoint keeps `numbers`.
    """

    def __init__(
        self,
        course: Course,
        states: States,
        measure: Callable[[bool], Measured],
        log: Log,
        skip_limit: int,
    ):
        super().__init__(log, skip_limit)
        self.course, self.states, self._measure = course, states, measure
        # When the work target was met; when the run took an earlier state as its last.
        self.frozen_at: int | None = None
        self.ended_at: int | None = None
        # The first state to return to when steps fail, beside those that the course wants.
        self.fallback_step: int | None = None
        # Returns: the wanted state last returned to; all; those since a step last succeeded.
        self.last_return_step: int | None = None
        self.returns = self.failed_returns = 0

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {**{name: getattr(self, name) for name in _NUMBERS}, "course": self.course.to_dict()}

    def load_(self, values: Mapping[str, Any]) -> None:
        """Take over what `numbers` gave, and the number of skipped steps."""
        self.course.load_(values["course"])
        for name in _NUMBERS:
            setattr(self, name, values.get(name, getattr(self, name)))
        self.skipped = values["skipped"]

    # --- the schedule -----------------------------------------------------------------------

    @property
    def compressor(self) -> "Compressor":
        return self.states.compressor

    @property
    def end(self) -> int:
        """Where the run ends, as far as it is known."""
        return self.course.steps if self.ended_at is None else self.ended_at

    def rate(self, step: int) -> float:
        return self.course.rate(step)

    def pressed_loss(self, step: int) -> float | None:
        return self.course.pressed_loss(step)

    def allowance(self, pressed_loss: float) -> float | None:
        return self.course.allowance(pressed_loss)

    def observe(self, losses: Sequence[float], due: bool) -> None:
        if due:
            self.course.observe(losses)
        else:
            self.course.defer(losses)

    def before_step(self) -> None:
        self.compressor.cut_share = self.course.cut_share
        super().before_step()

    # --- on the way -------------------------------------------------------------------------

    def decision_due(self) -> bool:
        return self.course.due(self.now)

    def decide(self, due: bool) -> bool:
        """Ask the course; keep or return to a state as it wants."""
        if not due:
            return False
        now, course = self.now, self.course
        if self.compressor.work_target_met and not self.failing and self.frozen_at is None:
            self.frozen_at = now
            course.end_compression(now)
        course.unit = self.compressor.state.cost_model.unit
        answer = course.advance(now, self.compressor.fma, self.selection_loss)
        if (doubt := course.in_doubt()) is not None:
            _logger.warning("warning: %s", doubt)
        wanted = [] if answer.return_to is None else [answer.return_to]
        if (found := self.states.find(wanted)) is not None:
            self._return(found, answer.reason)
        if answer.keep:
            self.states.keep(now, course.kept_steps())
        return answer.keep

    def selection_loss(self, thorough: bool = True) -> float:
        """The loss of the present model on selection data; the course takes in what is measured."""
        measured = self._measure(thorough)
        self.course.seen(measured)
        return measured.loss

    def _return(self, name: int, reason: str) -> None:
        self.return_to(self.states.step_of(name), reason, lambda: self.states.load(name))
        self.returns += 1
        if name in self.course.kept_steps():
            self.last_return_step = name
        self.fallback_step = name

    # --- steps that fail --------------------------------------------------------------------

    def step_succeeded(self) -> None:
        self.failed_returns = 0

    def failed(self, reason: str) -> None:
        """Return to the best state; after `TRIES` in a row end on one that held.

        UserError if there is no such state either.
        """
        now, candidates = self.now, self._fallbacks()
        if self.frozen_at == now:
            self.frozen_at = None  # the anneal has not begun
        if self.course.phase(now - 1) != "compression":
            small = self._within_work_target(candidates)
            candidates.sort(key=lambda each: each not in small)
        name = self.states.find(candidates)
        name = self.states.newest() if name is None else name
        if name is not None and self.failed_returns < TRIES:
            self._return(name, reason)
            self.failed_returns += 1
        elif (end := self._held_state()) is not None:
            self._end_on(end, f"{reason}; the run ends here, on a state that held its target")
        else:
            raise UserError(f"{reason}; {self.states.advice(name)}")

    def _fallbacks(self) -> list[int]:
        """States to return to when steps fail, the preferred one first."""
        newest = [] if self.fallback_step is None else [self.fallback_step]
        kept = self.course.kept_steps()
        return list(dict.fromkeys(kept + newest if self.failed_returns else newest + kept))

    def _within_work_target(self, names: Iterable[int]) -> list[int]:
        """Of these states those that keep a work target that is met."""
        most = self.compressor.fma_target if self.compressor.work_target_met else math.inf
        sizes = self.course.kept_sizes()
        return [name for name in names if sizes.get(name, 0.0) <= most]

    # --- the end ----------------------------------------------------------------------------

    def at_end(self, measured: Measured) -> Callable[[], None] | None:
        """What to do about the final model; None if it stays.

        Where it misses what is named, the run ends on the smallest state that had it.
        """
        self.course.seen(measured)
        if self.ended_at is not None or self.course.stays(measured.loss, self.compressor.fma):
            return None
        if (name := self._held_state()) is None:
            return None
        return lambda: self._end_on(name, f"a loss of {measured.loss:.4g} after the anneal")

    def _held_state(self) -> int | None:
        """The smallest state that has what is named, also if it is measured again."""
        for name in self._within_work_target(self.course.ends()):
            if self.states.find([name]) is None:
                continue
            found = self.states.measured(name)
            if found is None:
                return name
            self.course.seen(found)
            if found.loss <= self.course.named:
                return name
        return None

    def _end_on(self, name: int, reason: str) -> None:
        self._return(name, reason)
        self.ended_at = self.now
        self.course.ended_on(name)
        self.log.ended()


_NUMBERS = (
    "frozen_at",
    "ended_at",
    "fallback_step",
    "last_return_step",
    "returns",
    "failed_returns",
)
