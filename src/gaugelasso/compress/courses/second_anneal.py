"""The judgement of a last anneal on its way, and the second one, from a larger state.

How far the last anneal lowers the loss is an estimate. Where it was too good, the run would end
with a model that misses what is named, and with steps spent on it that a larger one needed.
Decides by numbers alone.
"""

import math
from dataclasses import dataclass, field

from gaugelasso.compress.courses.stages import Stages

# The long anneal lowers the loss further than a trial: by this share of what the trial did, on a
# logarithmic scale, and by at most `MOST_FURTHER`.
FURTHER, MOST_FURTHER = 0.7, 1.4
# The last anneal is judged at the second of these shares of it, by how the loss fell since the
# first: the rest lowers the loss by `TREND` times as much, logarithmically. A loss that is up to
# `ON_COURSE` times the pressed one follows it, and an end of up to `NEAR_ENOUGH` times the named loss
# is within the error of the estimate.
EARLY, JUDGED, TREND, ON_COURSE, NEAR_ENOUGH = 0.42, 0.63, 1.3, 1.1, 1.1
# A second anneal from a state that does not have the named loss yet lowers its loss by this share
# of what a whole one would.
SECOND = 0.5


@dataclass(frozen=True)
class Answer:
    """What a course wants done now: keep the present state, or return to one that was kept."""

    keep: bool = False
    return_to: int | None = None
    reason: str = field(default="", compare=False)


@dataclass
class SecondAnneal(Stages):
    """Fields that end in `_at` are steps."""

    def _further(self) -> float:
        """How much further than the trial the last anneal lowers the loss, logarithmically."""
        return min(FURTHER * max(self.fall, 0.0), MOST_FURTHER)

    def pressed_loss(self, step: int) -> float | None:
        """The loss that a step presses towards; None for a step without pressure."""
        raise NotImplementedError

    def _turn(self, past: int, now: int, step: int, fma: float, loss: float) -> Answer | None:
        """Begin a second anneal if this one will miss and a larger state will not.

        `past` and `now` number the last measurement of this anneal and this one.
        """
        allowed = self.turned_at is None and self.work_met_at is None
        if not allowed or self.named <= 0 or not math.isfinite(loss):
            return None
        measurements = (self.steps - self.began_at) / (4 * self.grain)
        if past < round(EARLY * measurements) <= now:
            self.early_loss = loss
        if self.early_loss is None or not past < round(JUDGED * measurements) <= now:
            return None
        fall = math.log(max(self.early_loss, 1e-12) / max(loss, 1e-12))
        expected = loss * math.exp(-TREND * max(fall, 0.0))
        place, size = self._larger_state()
        follows = loss <= ON_COURSE * (self.pressed_loss(step) or 0.0)
        if follows or expected <= NEAR_ENOUGH * self.named or place is None or size <= fma:
            return None
        self.turned_at = step
        self._enter("anneal", step, self.steps - step)
        self.recent, self.gap = [], None
        reason = (
            f"the last anneal of {fma:,.0f} FMA per token stands at a loss of {loss:.4g} and would "
            f"end at about {expected:.4g}, above {self.named:g}"
        )
        return Answer(return_to=place, reason=reason)

    def _larger_state(self) -> tuple[int | None, float]:
        """A state that has the named loss, or that would have it after a second anneal."""
        if self.held_at is not None:
            return self.held_at, self.held_fma
        reachable = self.spare_loss * math.exp(-SECOND * self._further()) <= self.named
        return (self.spare_at if reachable else None), self.spare_fma
