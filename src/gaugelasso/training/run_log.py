"""What the trainer does where steps are due: evaluate, log, write checkpoints."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from gaugelasso.compress.courses.window import Measured
from gaugelasso.runs.targets import named_loss
from gaugelasso.training.folder_log import FolderLog
from gaugelasso.training.records import Progress

if TYPE_CHECKING:
    from gaugelasso.training.state import RunState


class RunLog(FolderLog):
    """`evaluate(batches)` measures the present model on selection data."""

    # The run stops after this step: it is saved, whatever else is due.
    stopping = False

    def __init__(
        self,
        state: "RunState",
        evaluate: Callable[[int], Measured],
        on_progress: Callable[[Progress], None] | None,
    ):
        self._config, self._train = state.config, state.config.train
        super().__init__(state.folder, state.record, state.config.task.metric_name)
        self._state, self._evaluate, self._on_progress = state, evaluate, on_progress

    def is_due(self, what: str) -> bool:
        """Whether this step is one of every `what`_every, or the last."""
        step = self._state.steps
        every = getattr(self._train, f"{what}_every")
        return step == self._state.driver.end or bool(step % every == 0)

    def due(self) -> bool:
        return any(self.is_due(what) for what in ("log", "eval", "checkpoint"))

    def observed(self, losses: list[float]) -> None:
        self.record.add_losses_(losses, self._state.steps, self._config.target.named)
        self.record.skipped = self._state.driver.skipped

    def step(self, fma: float) -> None:
        super().step(fma + self._state.step.extra_work)

    # --- figures --------------------------------------------------------------------------

    def interval(self) -> None:
        """Evaluate and log, if it is due."""
        step_s = self.step_seconds(self._state.steps)
        if self.is_due("eval"):
            metric = self._evaluate(self._train.eval_batches).metric
            self.record.metric = metric if math.isfinite(metric) else None
        self.read_clock()
        if self.is_due("log"):
            self._log(step_s)

    def _log(self, step_s: float) -> None:
        step, driver, record = self._state.steps, self._state.driver, self.record
        record.close_interval_(step)
        if record.loss is None:
            return
        driver.interval_closed()
        phase, lr = driver.phase(step - 1), driver.rate(step - 1)
        row = self.write_row(self._state.compressor, phase, lr, step_s)
        if self._on_progress is not None:
            end, target = driver.end, self._config.target
            left_s, work = (end - step) * step_s, target.fma if target.kind == "fma" else 0.0
            context = (named_loss(target.named), record.fma_initial, self.metric_name, left_s)
            counted, pressed = self._config.compress.accounting, driver.pressed_loss(step - 1)
            progress = Progress(row, end, *context, target.metric, work, counted, pressed)
            self._on_progress(progress)

    # --- checkpoints ----------------------------------------------------------------------

    def save(self, keep: bool, due: bool) -> None:
        """Write a checkpoint: of a state to keep, if one is due, or because the run stops.

        After the log, whose row is of the stage that ends here and belongs to the checkpoint,
        and which may find the work target met and this step the last.
        """
        owed = keep or (due and self._state.driver.checkpoint_due(self.record))
        if self.stopping or owed:
            self._save(owed)
        self.start_lap(self._state.steps)

    def _save(self, owed: bool) -> None:
        state, driver, failing = self._state, self._state.driver, self._state.driver.failing
        if failing and not (self.stopping or state.steps == driver.end):
            return  # until a step succeeds; the checkpoint before is kept
        if failing:
            state.compressor.resume_state.forget_energies_()
        if not state.compressor.resume_state.finite():
            driver.fail("a weight is NaN or infinite")
        elif owed and not failing:
            driver.before_save(self.record)
        state.save()

    def ended(self) -> None:
        self._state.save()
