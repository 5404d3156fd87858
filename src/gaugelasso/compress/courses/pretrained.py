"""The course of a model whose channels go by their harm: it may hold the target from the start.

Then the run must not end on a worse one. Its start is kept, to end on if all else misses. A model
with nearly all of its work that has lost the target loss has lost it by training alone: the rate is
too high for these weights and this batch. The run goes back, and on at half of it. This is looked
at after the warm-up, where only a loss far above the target tells, and at the end of each trial.

Decides by numbers alone, as `Course` does.
"""

import math
from dataclasses import dataclass

from gaugelasso.compress.courses.course import Answer, Course, Measure

# Nearly all of the work: more than this share.
HARDLY_CUT = 0.95
# At the full rate the loss is higher than after an anneal. It is far above where it has risen by so
# many times what is allowed, on a logarithmic scale, and by this much at least.
FAR, LEAST_FAR = 3.0, 0.03


@dataclass
class PretrainedCourse(Course):
    """`start_at` is None for a model that does not have the target loss."""

    # Whether the start has been measured.
    checked: bool = False
    start_at: int | None = None
    start_fma: float = math.inf
    start_loss: float = math.inf
    # The share of the learning rate that is left, and when it was last looked at.
    slower: float = 1.0
    looked_at: int = 0

    def rate(self, step: int) -> float:
        return self.slower * super().rate(step)

    def due(self, step: int) -> bool:
        """Also after the first step, when the rate is still low: that is the start."""
        return not self.checked or super().due(step)

    def kept_sizes(self) -> dict[int, float]:
        sizes = super().kept_sizes()
        return sizes if self.start_at is None else {**sizes, self.start_at: self.start_fma}

    def ends(self) -> dict[int, float]:
        start = {} if self.start_at is None else {self.start_at: self.start_loss}
        return {**super().ends(), **start}

    def _is_sound(self, name: str, value: object) -> bool:
        sound = super()._is_sound(name, value)
        return sound and (name != "slower" or (isinstance(value, int | float) and 0 < value <= 1))

    def advance(self, step: int, fma: float, selection_loss: Measure) -> Answer:
        first, self.checked = not self.checked, True
        answer = super().advance(step, fma, selection_loss)
        if self.stage != "start":
            return answer
        if first and (loss := selection_loss(True)) <= self.named:
            self.start_at = self.good_at = step
            self.start_fma = self.good_fma = fma
            self.start_loss = loss
            return Answer(keep=True)
        if self.start_at is not None and self._is_far(step, fma, selection_loss):
            return self._slow_down("the warm-up")
        return answer

    def _is_far(self, step: int, fma: float, selection_loss: Measure) -> bool:
        """Looks once after the warm-up, and once more after each time that the rate was halved."""
        halved = round(-math.log2(self.slower))
        after = (1 + halved) * max(self.warmup, 2 * self.grain)
        if self.looked_at >= after or step < after or fma <= HARDLY_CUT * self.start_fma:
            return False
        self.looked_at = step
        if self.start_loss <= 0:  # which has no logarithm
            return False
        allowed = max(FAR * math.log(self.named / self.start_loss), LEAST_FAR)
        return not selection_loss(False) <= self.start_loss * math.exp(allowed)

    def _judge(self, step: int, fma: float, loss: float) -> Answer:
        """As of any model, but a trial of the whole one that misses is no fault of the press."""
        names = ("good_at", "good_fma", "good_fall", "good_loss", "too_loose", "provisional")
        before = {name: getattr(self, name) for name in names}
        answer = super()._judge(step, fma, loss)
        if loss <= self.named or fma <= HARDLY_CUT * self.start_fma:
            return answer
        for name, value in before.items():
            setattr(self, name, value)
        return self._slow_down("a trial anneal")

    def _slow_down(self, what: str) -> Answer:
        self.slower, self.recent = 0.5 * self.slower, []
        return Answer(
            return_to=self.good_at,
            reason=f"after {what} the model, hardly cut, has lost the target loss by training "
            f"alone, so the learning rate is halved to {self.slower * self.lr:.3g}",
        )
