"""The phases of a pressed run, as returns and freezes have changed its schedule."""

from dataclasses import dataclass, field
from typing import Any

from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.courses.stages import Phase
from gaugelasso.config import Config
from gaugelasso.training.answers import SavedStates
from gaugelasso.training.records import RunRecord
from gaugelasso.training.schedule import Schedule

NOT_SAVED: Any = {"saved": False}


@dataclass
class Phases:
    """When each phase begins, at which learning rate, and towards which loss a step presses."""

    config: Config = field(metadata=NOT_SAVED, repr=False)
    states: SavedStates = field(metadata=NOT_SAVED, repr=False)
    schedule: Schedule = field(metadata=NOT_SAVED, repr=False)
    # The anneal: when the structure froze for it, and how long a second one is, once there is one.
    frozen_at: int | None = None
    second_anneal_steps: int = 0
    # When the run took an earlier state as its last.
    ended_at: int | None = None

    def _schedule(self) -> Schedule:
        again = self.second_anneal_steps
        return self.schedule.again(again) if again else self.schedule

    @property
    def end(self) -> int:
        """The number of steps of the whole run, as far as it is known."""
        return self._schedule().end(self.frozen_at) if self.ended_at is None else self.ended_at

    def phase(self, step: int) -> Phase:
        return self._schedule().phase(step, self.frozen_at)

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self._schedule().rate(step, self.frozen_at)

    def pressed_loss(self, step: int) -> float | None:
        """The loss that a step presses towards; None for a step without pressure."""
        return self.config.target.pressed if self.phase(step) == "compression" else None

    def freeze_if_met_(self, compressor: Compressor, record: RunRecord, failing: bool) -> None:
        """Freeze the structure and start the anneal once the work target is met and loss held.

        An interval that began before the last cut does not count: it is of another structure. Nor
        does one that ends with a skipped step, which has no checkpoint.
        """
        met = compressor.work_target_met and record.row_at >= record.cut_at and not failing
        pressing = self.phase(compressor.steps) == "compression"
        if pressing and met and record.holds(self.config.target.pressed):
            self.freeze_(compressor.steps)

    def freeze_(self, step: int) -> None:
        """The work target is met and the loss held: the anneal starts at this step."""
        self.frozen_at = step

    def is_missed(self, record: RunRecord) -> bool:
        """Whether a final model that does not hold its target means that the run has failed.

        A pressed run has reached its target if training did.
        """
        return record.best_loss is None or record.best_loss > self.config.target.pressed
