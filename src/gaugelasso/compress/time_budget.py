"""The clock of a run that has a time in place of a number of steps.

The course counts ticks of this clock where it would count steps.
"""

import time

from gaugelasso.compress.courses.stages import TICKS
from gaugelasso.compress.defaults import default_interval


class TimeBudget:
    """`seconds` from the first step on. `chooses_interval`: the user has not given one."""

    def __init__(self, seconds: float, chooses_interval: bool):
        self._seconds, self.chooses_interval = seconds, chooses_interval
        self._began: float | None = None
        self._first_ended_at: int | None = None

    def start(self) -> None:
        """A step begins; the first one starts the clock."""
        if self._began is None:
            self._began = time.monotonic()
        elif self._first_ended_at is None:
            self._first_ended_at = self.ticks

    @property
    def ticks(self) -> int:
        """How much of the time has passed."""
        if self._began is None:
            return 0
        passed = (time.monotonic() - self._began) / self._seconds
        return min(int(passed * TICKS), TICKS)

    def interval(self, steps: int) -> int:
        """The steps from one event to the next, by the time that so many steps took.

        The first step does not count unless it is the only one: it may have compiled kernels.
        """
        first = self._first_ended_at
        taken, passed = (steps, self.ticks) if first is None else (steps - 1, self.ticks - first)
        return default_interval(round(taken * TICKS / max(passed, 1)))
