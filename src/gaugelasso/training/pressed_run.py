"""A run of the trainer towards a pressed loss, as in the paper.

Carries out what `Rollback` answers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.courses.stages import Phase
from gaugelasso.compress.courses.window import Measured
from gaugelasso.compress.driver import Driver
from gaugelasso.training.answers import Answer, EndOn, Stay
from gaugelasso.training.records import RunRecord
from gaugelasso.training.rollback import Rollback
from gaugelasso.training.schedule import Schedule

if TYPE_CHECKING:
    from gaugelasso.training.run_log import RunLog
    from gaugelasso.training.state import RunState


class PressedRun(Driver):
    """`rollback` decides, and owns every number that this depends on."""

    def __init__(self, state: "RunState", log: "RunLog"):
        config = state.config
        super().__init__(log, config.train.skip_limit)
        self._state, self._run_log = state, log
        self.rollback = Rollback(config, state.saved, Schedule.of(config))

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return self.rollback.to_dict()

    def load_(self, values: Mapping[str, Any]) -> None:
        """Take over what `to_dict` gave, and the number of skipped steps."""
        self.rollback.load_(values)
        self.skipped = values["skipped"]

    # --- the schedule -----------------------------------------------------------------------

    @property
    def compressor(self) -> Compressor:
        return self._state.compressor

    @property
    def end(self) -> int:
        return self.rollback.end

    def phase(self, step: int) -> Phase:
        return self.rollback.phase(step)

    def rate(self, step: int) -> float:
        return self.rollback.rate(step)

    def pressed_loss(self, step: int) -> float | None:
        return self.rollback.pressed_loss(step)

    @property
    def pressure(self) -> float:
        return self.rollback.pressure

    def allowance(self, pressed_loss: float) -> float | None:
        return None

    def where(self) -> str:
        return self._state.where()

    def observe(self, losses: Sequence[float], due: bool) -> None:
        """The record has them, and `rollback` reads it."""

    # --- decisions --------------------------------------------------------------------------

    def decision_due(self) -> bool:
        return self._run_log.is_due("log")

    def decide(self, due: bool) -> bool:
        if self._run_log.is_due("log"):  # also where the run has just ended on this step
            pressed = self.phase(self.now - 1) == "compression"
            self._carry_out(self.rollback.after_interval(self._state.record, pressed))
        return False

    def interval_closed(self) -> None:
        """The structure freezes here if the work target is met and the loss held."""
        self.rollback.freeze_if_met_(self.compressor, self._state.record, bool(self.failing))

    def step_succeeded(self) -> None:
        self.rollback.step_succeeded_()

    def failed(self, reason: str) -> None:
        met = self.compressor.work_target_met
        self._carry_out(self.rollback.after_failure(reason, self.now, met))

    def at_end(self, measured: Measured) -> Callable[[], None] | None:
        """What to do about the final model; None if it stays."""
        met = self.compressor.work_target_met
        answer = self.rollback.at_end(measured.loss, self._state.record, met)
        return None if answer == Stay() else lambda: self._carry_out(answer)

    def _carry_out(self, answer: Answer) -> None:
        if isinstance(answer, Stay):
            return
        saved = answer.saved
        self.return_to(saved.step, answer.reason, lambda: self._state.load(saved))
        self.rollback.returned_(answer, self.now)
        if isinstance(answer, EndOn):
            self.log.ended()

    # --- checkpoints ------------------------------------------------------------------------

    def checkpoint_due(self, record: RunRecord) -> bool:
        return self.rollback.checkpoint_due(record, self.now)

    def before_save(self, record: RunRecord) -> None:
        self.rollback.before_save_(record, self.now, self.compressor.fma)

    def wanted_steps(self) -> list[int]:
        return self.rollback.wanted_steps()

    def is_missed(self, record: RunRecord) -> bool:
        # The loss of a pressed run is that under pressure; the work is of the final model.
        work = self.compressor.fma_target > 0 and not self.compressor.work_target_met
        return work or self.rollback.is_missed(record)
