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
# first: the rest lowers the loss by `TREND` times as much, logarithmically. An anneal with fewer
# measurements than `LEAST` is not judged.
EARLY, JUDGED, TREND, LEAST = 0.42, 0.63, 1.3, 6
# A loss is about at another one up to this share of it, and this share of the way from the first
# loss down to it: the second matters for losses that never come near zero.
ABOUT, ABOUT_WAY = 0.1, 0.02
# A second anneal from a state that does not have the named loss yet lowers its loss by this share
# of what a whole one would.
SECOND = 0.5


@dataclass(frozen=True)
class Answer:
    """What a course wants done now: keep the present state, or return to one that was kept."""

    keep: bool = False
    return_to: int | None = None
    second_anneal: bool = False  # from the state to return to
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

    def begin_second_anneal(self, step: int) -> None:
        """The run has returned to a larger state, which the rest of its steps anneal."""
        self.second_anneal_at = step
        self._enter("anneal", step, self.steps - step)
        self.recent, self.gap, self.released = [], None, False

    def _judge_anneal(self, past: int, now: int, fma: float, loss: float) -> Answer | None:
        """Ask for a second anneal if this one will miss and a larger state will not.

        `past` and `now` number the last measurement of this anneal and this one.
        """
        measurements = (self.steps - self.began_at) / (4 * self.grain)
        if self.second_anneal_at is not None or measurements < LEAST:
            return None
        if self.named <= 0 or not math.isfinite(loss):
            return None
        early = self.early_loss
        if past < round(EARLY * measurements) <= now:
            self.early_loss = loss
        if early is None or not past < round(JUDGED * measurements) <= now:
            return None
        fall = math.log(max(early, 1e-12) / max(loss, 1e-12))
        expected = loss * math.exp(-TREND * max(fall, 0.0))
        pressed = self.pressed_loss(self.advanced_at)
        follows = pressed is not None and loss <= self._about(pressed) + max(self.gap or 0.0, 0.0)
        place, size = self._larger_state()
        if follows or expected <= self._about(self.named) or place is None or size <= fma:
            return None
        reason = (
            f"the last anneal of {fma:,.0f} FMA per token stands at a loss of {loss:.4g} and would "
            f"end at about {expected:.4g}, above {self.named:g}"
        )
        return Answer(return_to=place, second_anneal=True, reason=reason)

    def _about(self, loss: float) -> float:
        way = (self.first_loss or loss) - loss
        return loss + min(ABOUT * loss, ABOUT_WAY * max(way, 0.0))

    def _larger_state(self) -> tuple[int | None, float]:
        """A state that has the named loss, or that would have it after a second anneal."""
        if self.held_at is not None:
            return self.held_at, self.held_fma
        reachable = self.best_trial_loss * math.exp(-SECOND * self._further()) <= self.named
        return (self.best_trial_at if reachable else None), self.best_trial_fma
