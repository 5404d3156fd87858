"""The course of a run that names a work per token, and wants the least loss at it.

There is no target loss, so the work follows a schedule, geometric in time, and the pressed loss
follows the work: the further the work is behind its schedule, the higher above the present loss.
When the work is reached, the rest of the run is one anneal without pressure.

                 start                          anneal
    rate       /------------------------\\.._______________
    pressure          ...-----==========
    work       -------....____

The descent begins once the model has learned for a while: what a model does not use yet, pressure
removes, whether it would be needed or not.

Decides by numbers alone, as `Course` does.
"""

import math
from dataclasses import dataclass

from gaugelasso.compress.courses.course import EVENT_SHARE, EVENT_WAY, Answer, Course, Measure
from gaugelasso.compress.courses.window import WINDOW

# The model learns without pressure over this share of the steps, and over no more than so many.
LEARNS, LONGEST = 0.2, 2000
# The work should be reached at this share of the steps; the anneal begins at the latest at this.
REACHED, LATEST = 0.5, 0.8
# The pressed loss is at most a share of the way from the least loss so far up to the first one. The
# share grows from zero to this by the time when the work should be reached: above that a model
# forgets what it has learned. It grows on, to one, where the work comes too late.
WAY = 0.2
# It is there where the work is this much behind its schedule, on a logarithmic scale, and at the
# present loss where the work is on schedule.
BEHIND = 0.25
# A state to return to when steps fail is kept so many times in a run.
KEPT = 10


@dataclass(kw_only=True)
class WorkCourse(Course):
    """`goal` is the work per token to end at. Every final loss will do."""

    named: float = math.inf
    goal: float = 0.0
    # The work at the start, how far the present one is behind, logarithmically, and the least loss.
    fma_first: float | None = None
    behind: float = 0.0
    least_loss: float | None = None

    def __post_init__(self) -> None:
        self.ends_at = self.ends_at or max(1, round(LATEST * self.steps))
        super().__post_init__()
        self.descent_at = max(self.warmup, min(round(LEARNS * self.steps), LONGEST))

    def pressed_loss(self, step: int) -> float | None:
        """Between the present loss and the most, by how far the work is behind."""
        if step < self.descent_at or self.least_loss is None or self.first_loss is None:
            return None
        late = (step / self.steps - REACHED) / (LATEST - REACHED)
        way = WAY * min(self._through(step), 1.0) + (1 - WAY) * min(max(late, 0.0), 1.0)
        most = self.least_loss + way * max(self.first_loss - self.least_loss, 0.0)
        share = min(max(self.behind / BEHIND, -1.0), 1.0)
        if 0 < self.loss < most:  # geometric, for losses that come near zero
            return self.loss * (most / self.loss) ** share
        return min(self.loss + share * abs(most - self.loss), most)

    def allowance(self, pressed_loss: float) -> float:
        way = (self.first_loss or 0.0) - (self.least_loss or 0.0)
        return min(EVENT_SHARE * abs(pressed_loss), EVENT_WAY * max(way, 0.0))

    def scheduled(self, step: int) -> float:
        """The work per token that the schedule wants after so many steps.

        It goes on below the goal, so that work that is a little above it is more and more behind.
        """
        first = max(self.fma_first or self.goal, self.goal)
        return first * (self.goal / first) ** self._through(step)

    def _through(self, step: int) -> float:
        """How much of the time of the descent is over; one where the work should be reached."""
        length = max(REACHED * self.steps - self.descent_at, 1)
        return max(step - self.descent_at, 0) / length

    def advance(self, step: int, fma: float, selection_loss: Measure) -> Answer:
        self.advanced_at = step
        self.fma_first = self.fma_first or fma
        self.behind = math.log(max(fma, 1e-12) / self.scheduled(step))
        if len(self.recent) >= WINDOW:
            least = math.inf if self.least_loss is None else self.least_loss
            self.least_loss = min(self.loss, least)
        if self.stage != "anneal" and step >= self.ends_at:
            self._enter("anneal", step, self.steps - step)
        every = max(1, self.steps // KEPT)
        if step // every > (self.good_at or 0) // every and step < self.steps:
            self.good_at, self.good_fma = step, fma
            return Answer(keep=True)
        return Answer()
