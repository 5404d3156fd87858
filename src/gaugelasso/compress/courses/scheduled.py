"""The course to a work per token where channels go by their harm: the work follows its schedule.

A pressed loss means nothing here. While the work is behind its schedule there is always margin,
and each event cuts; while it is not, there is none.
"""

import math
from dataclasses import dataclass

from gaugelasso.compress.courses.work import WorkCourse

# What one event may raise the loss of its batch by, as a share of it, and how much more for work
# that is behind its schedule, by the logarithm of that.
_EVENT_SHARE, _BEHIND = 0.02, 20.0


@dataclass(kw_only=True)
class ScheduledCourse(WorkCourse):
    """A pretrained model has learned already, so the descent begins after the warm-up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.descent_at = self.warmup

    def pressed_loss(self, step: int) -> float | None:
        if step < self.descent_at or self.fma_first is None or not self.recent:
            return None
        behind = self.stage != "anneal" and self.behind > 0
        return self.loss + abs(self.loss) + 1 if behind else None

    @property
    def cut_share(self) -> float:
        """As much as the work is behind, so that any work can be reached."""
        return max(super().cut_share, 1 - math.exp(-max(self.behind, 0.0)))

    def allowance(self, pressed_loss: float) -> float:
        return _EVENT_SHARE * (1 + _BEHIND * max(self.behind, 0.0)) * abs(self.loss)
