"""The stages of a course: when each begins and ends, and its learning rate. Knows no losses."""

import math
from dataclasses import dataclass
from typing import Literal

from gaugelasso.compress.courses.state import CourseState, Stage

Phase = Literal["warmup", "compression", "trial", "cooldown"]

# With fewer steps the stages have no room. A time budget is divided into so many ticks, which the
# course counts in place of steps.
LEAST_STEPS, TICKS = 20, 10_000
# The lengths of the stages, as shares of all steps. With these a run has three trials.
WARMUP, START, TRIAL, PRESS, ANNEAL = 0.05, 0.2, 0.06, 0.12, 0.38
# A warm-up is no longer than this many steps: they are the most expensive ones, of the full model.
LONGEST_WARMUP = 500
# The learning rate at the end of an anneal, and at the start of the last one, as shares of the
# full rate.
LEAST_RATE, RESTART = 0.05, 0.75


def default_warmup(steps: int) -> int:
    """The warm-up of a run of this many steps."""
    return min(round(WARMUP * steps), LONGEST_WARMUP)


@dataclass
class Stages(CourseState):
    """Fields that end in `_at` are steps."""

    def __post_init__(self) -> None:
        if self.warmup < 0:
            self.warmup = default_warmup(self.steps)
        if self.anneal < 0:
            self.anneal = round(ANNEAL * self.steps)
        if self.least_rate < 0:
            self.least_rate = LEAST_RATE * self.lr
        self.grain = max(1, self.steps // 100)
        self.ends_at = self.ends_at or self._whole(START * self.steps)

    def _whole(self, steps: float) -> int:
        """A number of steps as a multiple of the grain, at least one."""
        return max(1, round(steps / self.grain)) * self.grain

    def phase(self, step: int) -> Phase:
        """What a step is for."""
        if step < self.warmup:
            return "warmup"
        names: dict[Stage, Phase] = {"start": "compression", "press": "compression"}
        names |= {"trial": "trial", "anneal": "cooldown"}
        return names[self.stage]

    def _share(self, step: int) -> float:
        """Where the rate stands between the least (0) and the full one (1)."""
        through = (step - self.began_at) / max(self.ends_at - self.began_at, 1)
        cosine = 0.5 * (1 + math.cos(math.pi * min(through, 1.0)))
        return {"start": 1.0, "press": 1.0, "trial": cosine, "anneal": RESTART * cosine}[self.stage]

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.least_rate + (self.lr - self.least_rate) * self._share(step)

    def due(self, step: int) -> bool:
        """Whether to call `advance` after so many steps."""
        grain_over = step // self.grain > self.advanced_at // self.grain
        return grain_over or step >= self.ends_at > self.advanced_at

    def _enter(self, stage: Stage, step: int, length: int) -> None:
        self.stage, self.began_at, self.ends_at = stage, step, min(step + length, self.steps)

    def _planned(self, step: int) -> int:
        """When this stage should have ended, if that is not long ago, else now.

        With a time budget, a step jumps over ticks. Without the plan each stage would begin later
        than the one before it ended, and there would be no time left for the last trial.
        """
        late = step - self.ends_at
        return self.ends_at if 0 <= late < self._whole(TRIAL * self.steps) else step

    def _enter_planned(self, stage: Stage, step: int, share: float) -> None:
        """Enter a stage that ends a share of all steps after the planned end of this one."""
        self._enter(stage, step, self._planned(step) + self._whole(share * self.steps) - step)

    def _another_trial(self, step: int) -> bool:
        """Whether a press and a trial fit before the last anneal."""
        both = self._whole(PRESS * self.steps) + self._whole(TRIAL * self.steps)
        return self._planned(step) + both <= self.steps - self.anneal + self.grain

    def _after_trial(self, step: int) -> None:
        if self._another_trial(step):
            self._enter_planned("press", step, PRESS)
        else:
            self._enter("anneal", step, self.steps - step)

    def end_compression(self, step: int) -> None:
        """The work target is met: the rest of the run is the last anneal."""
        if self.stage != "anneal":
            self._enter("anneal", step, self.steps - step)
