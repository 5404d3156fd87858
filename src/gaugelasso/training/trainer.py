"""The trainer: one run from its configuration to its summary.

Drives the compressor through the phases of the schedule, evaluates on held-out data, saves, and
carries out what `Rollback` answers. Decides nothing about structure.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugelasso.axes import Compressible
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.courses.window import Measured
from gaugelasso.compress.events import Event
from gaugelasso.compress.result import TargetMissed
from gaugelasso.config import Config
from gaugelasso.distributed import ALONE, Team
from gaugelasso.runs.folder import Existing, ReadOnlyRunFolder, RunFolder, RunFolderBase
from gaugelasso.runs.structures import Structure
from gaugelasso.signals import StopRequest, stop_requests
from gaugelasso.tasks import SELECTION, TEST
from gaugelasso.training.answers import Answer, EndOn, Stay
from gaugelasso.training.evaluation import (
    HeldOut,
    choose_device,
    configure_cpu_,
    evaluate,
    final_evaluation,
    samples,
)
from gaugelasso.training.opening import check_data, check_named
from gaugelasso.training.records import Progress, RunRecord, metrics_row, missed_message, summary
from gaugelasso.training.reference_file import reference_entry
from gaugelasso.training.rollback import Rollback
from gaugelasso.training.state import RunState
from gaugelasso.training.step import microbatches_of
from gaugelasso.training.structure import check_fits


class Trainer:
    """Build with a config and a folder, then `run()`. `structure` replaces that of [model]."""

    def __init__(
        self,
        config: Config,
        out: Path,
        existing: Existing = "refuse",
        on_progress: Callable[[Progress], None] | None = None,
        team: Team = ALONE,
        structure: Structure | None = None,
    ):
        self.config, self.train, self.task, self.team = config, config.train, config.task, team
        check_named(config)
        check_fits(config, structure)
        microbatches_of(config, team)  # refuses a number that the ranks cannot share equally
        team.check_same(json.dumps(config.to_dict()), "by its config")
        self.device = choose_device(self.train.device, team.local)
        configure_cpu_(config, self.device)
        self.on_progress = on_progress
        self._losses: list[Tensor] = []
        self.folder: RunFolderBase = ReadOnlyRunFolder(out)
        team.on_rank0(lambda: self._open(existing))
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.folder.close)
            resume, device = existing == "resume", self.device
            self.state = RunState(config, device, self.folder, team, resume, structure)
            on_failure.pop_all()

    def _open(self, existing: Existing) -> None:
        # First of all: unreadable data must not cost a run that is in the folder already.
        check_data(self.config, self.device)
        self.folder = RunFolder.open(self.folder.path, existing)

    @property
    def model(self) -> Compressible:
        return self.state.model

    @property
    def compressor(self) -> Compressor:
        return self.state.compressor

    @property
    def record(self) -> RunRecord:
        return self.state.record

    @property
    def rollback(self) -> Rollback:
        return self.state.rollback

    # --- the run ------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the summary that is also in the folder.

        On SIGTERM or Ctrl-C it saves and raises Stopped.
        """
        self.team.clear_stop()
        with contextlib.closing(self.folder), stop_requests() as request:
            while True:
                self._train(request)
                with self._interruptible(request):
                    held_out, met = self._final(SELECTION), self.compressor.work_target_met
                    self.rollback.seen(Measured(held_out.loss, held_out.metric))
                    answer = self.rollback.at_end(held_out.loss, self.record, met)
                    summary = self._summary(held_out) if answer == Stay() else {}
                if summary:
                    return self._finish(summary)
                self.folder.reopen()
                self._carry_out(answer)

    def _interruptible(self, request: StopRequest) -> contextlib.AbstractContextManager[None]:
        """Around an evaluation: it may be interrupted, unless other ranks wait in a collective."""
        if self.team.size > 1:
            return contextlib.nullcontext()
        return request.interruptible(self._resumable_message())

    def _train(self, request: StopRequest) -> None:
        began = time.perf_counter() - self.record.wall_s
        mark, marked_step = time.perf_counter(), self.compressor.steps
        while self.compressor.steps < self.rollback.end:
            self._step()
            stopping = self._is_stopping(request)
            course = self.rollback.course_due(self.compressor.steps)
            due = course or any(self._due(key) for key in ("log", "eval", "checkpoint"))
            if not stopping and not due:
                continue
            self._read_losses()
            if due:
                self.compressor.scalars.reset_streak_()
                if self.state.streak >= self.train.skip_limit:
                    self._handle_failure("loss or gradient is NaN or infinite")
            step_s = (time.perf_counter() - mark) / (self.compressor.steps - marked_step)
            if self._due("eval"):
                metric = self.evaluate(self.train.eval_batches).metric
                self.record.metric = metric if math.isfinite(metric) else None
            self.record.wall_s = time.perf_counter() - began
            if self._due("log"):
                self._log(step_s)
                self._carry_out(self.rollback.after_interval(self.record, self._compressing()))
            # After the log, whose row is of the stage that ends here and belongs to the checkpoint,
            # and which may find the work target met and this step the last.
            keep, step = course and self._follow_course(), self.compressor.steps
            owed = keep or (due and self.rollback.checkpoint_due(self.record, step))
            if stopping or owed:
                self._save(owed, stopping)
            if stopping:
                raise request.stopped(self._resumable_message())
            mark, marked_step = time.perf_counter(), self.compressor.steps

    def _step(self) -> Event | None:
        step, rollback = self.compressor.steps, self.rollback
        pressed = rollback.pressed_loss(step)
        self.compressor.set_pressure_(0.0 if pressed is None else rollback.pressure)
        if pressed is not None:
            self.compressor.set_loss_target_(pressed, rollback.allowance(pressed))
        self.compressor.set_lr_(rollback.rate(step))
        self.state.step.load_(step)
        self.state.step()
        self._losses.append(self.state.step.loss.clone())
        self.record.training_fma += self.compressor.fma
        event = self.compressor.finish_step_()
        if event is not None:
            self.folder.append("events.jsonl", event.to_dict())
            if event.dropped:
                self.record.cut_at = self.compressor.steps
        return event

    def _follow_course(self) -> bool:
        """Return to a kept state where the course wants it; whether to keep the present one."""
        failing = bool(self.state.failing)
        keep, answer = self.rollback.advance(self.compressor, failing, self._selection_loss)
        self._carry_out(answer)
        return keep

    def _selection_loss(self, thorough: bool) -> float:
        batches = math.ceil(self.train.final_batches / (1 if thorough else 2))
        measured = self.evaluate(batches)
        self.rollback.seen(measured)
        return measured.loss

    def evaluate(self, batches: int) -> Measured:
        """Mean loss and metric on selection data."""
        measured = evaluate(self.model, self.config, batches, self.device, self.team)
        self.model.train()
        if self.device.startswith("cuda"):  # what is left in use is what training needs
            torch.cuda.empty_cache()
        return measured

    def _due(self, what: str) -> bool:
        """Whether this step is one of every `what`_every, or the last."""
        step = self.compressor.steps
        every = getattr(self.train, f"{what}_every")
        return step == self.rollback.end or bool(step % every == 0)

    def _compressing(self) -> bool:
        """Whether the last step was one of the compression phase."""
        return self.rollback.phase(self.compressor.steps - 1) == "compression"

    def _read_losses(self) -> None:
        """Take in the losses since the last call, and how many steps were skipped."""
        compressor, record = self.compressor, self.record
        losses, target = torch.stack(self._losses).tolist(), self.config.target.named
        record.add_losses_(losses, compressor.steps, target)
        self.rollback.observe(losses)
        skipped, self.state.failing, self.state.streak = compressor.scalars.counts()
        if skipped - record.skipped < len(self._losses):
            self.rollback.step_succeeded_()
        record.skipped = skipped
        self._losses.clear()

    # --- rollback -------------------------------------------------------------------

    def _carry_out(self, answer: Answer) -> None:
        if isinstance(answer, Stay):
            return
        self.state.roll_back(answer)
        if isinstance(answer, EndOn):
            self.state.save()

    def _handle_failure(self, what: str) -> None:
        steps = self.compressor.steps
        reason = f"{what} at step {steps} (batch seed {self.state.step.draw(steps - 1).seed})"
        met = self.compressor.work_target_met
        self._carry_out(self.rollback.after_failure(reason, steps, met))

    def _save(self, owed: bool, stopping: bool) -> None:
        failing, step = self.state.failing, self.compressor.steps
        if failing and not (stopping or step == self.rollback.end):
            return  # until a step succeeds; the checkpoint before is kept
        if failing:
            self.compressor.resume_state.forget_energies_()
        if not self.compressor.resume_state.finite():
            self._handle_failure("a weight is NaN or infinite")
        elif owed and not failing:
            self.rollback.before_save_(self.record, step, self.compressor.fma)
        self.state.save()

    # --- stops ----------------------------------------------------------------------

    def _is_stopping(self, request: StopRequest) -> bool:
        """Whether to stop after this step. Every rank decides alike, one exchange later.

        On a GPU the flag is read only where the host waits for the device anyway.
        """
        if self.team.size == 1:
            return request.asked
        known = self.device == "cpu" or self._due("log")
        stopping = known and self.team.stop_requested
        if request.asked:
            self.team.request_stop()  # exchanged with the next step
        return stopping

    def _resumable_message(self) -> str:
        return (
            f"after step {self.compressor.steps}, which is saved in "
            f"{str(self.folder.checkpoints)!r}; go on with --resume"
        )

    # --- logs and the summary ---------------------------------------------------------

    def _log(self, step_s: float) -> None:
        step, record, rollback = self.compressor.steps, self.record, self.rollback
        record.close_interval_(step)
        if record.loss is None:
            return
        rollback.freeze_if_met_(self.compressor, record, bool(self.state.failing))
        phase, lr, name = rollback.phase(step - 1), rollback.rate(step - 1), self.task.metric_name
        row = metrics_row(self.compressor, self.model, record, name, phase, lr, step_s)
        self.folder.append("metrics.jsonl", row)
        if self.on_progress is not None:
            end, target = rollback.end, self.config.target
            left_s, work = (end - step) * step_s, target.fma if target.kind == "fma" else 0.0
            context = (target.named, record.fma_initial, name, left_s)
            self.on_progress(Progress(row, end, *context, target.metric, work))

    def _final(self, stream: int) -> HeldOut:
        return final_evaluation(self.model, self.config, self.device, self.team, stream)

    def _summary(self, selection: HeldOut) -> dict[str, Any]:
        test, state = self._final(TEST), self.rollback.to_dict()
        config, record = self.config, self.record
        found = summary(config, self.device, self.compressor, record, state, test, selection)
        return found | reference_entry(config, self.folder.path)

    def _finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        if shown := samples(self.model, self.config, self.device):
            self.folder.write_arrays("samples.npz", shown)
        self.folder.write("summary.json", summary)
        if not summary["held"] and self.rollback.is_missed(self.record):
            where = str(self.folder.checkpoints)
            raise TargetMissed(missed_message(self.record, summary, where))
        return summary
