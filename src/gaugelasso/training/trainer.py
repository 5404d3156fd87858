"""The trainer: one run from config to summary.

Drives the compressor through the phases, evaluates on held-out data, goes back where the
target is lost. Decides nothing about structure.
"""

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.events import Event
from gaugelasso.config import Config
from gaugelasso.distributed import ALONE, Team
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from gaugelasso.runs.folder import Existing, ReadOnlyRunFolder, RunFolder, RunFolderBase
from gaugelasso.signals import StopRequest, stop_requests
from gaugelasso.tasks import EVALUATION, TRAINING, Draw
from gaugelasso.training import watch
from gaugelasso.training.ending import end_early, final, missed_message, next_attempt, small_enough
from gaugelasso.training.evaluation import choose_device, configure_cpu_, evaluate, samples
from gaugelasso.training.memory import Memory
from gaugelasso.training.records import Progress, metrics_row, summary
from gaugelasso.training.schedule import Schedule
from gaugelasso.training.state import RunState
from gaugelasso.training.step import microbatches_of

_log = logging.getLogger(__name__)


class TargetMissed(UserError):
    """The run ended without ever reaching its loss target."""


class Trainer:
    """Build with a config and a folder, then `run()`."""

    def __init__(
        self,
        config: Config,
        out: Path,
        existing: Existing = "refuse",
        on_progress: Callable[[Progress], None] | None = None,
        team: Team = ALONE,
    ):
        self.config, self.train, self.task, self.team = config, config.train, config.task, team
        microbatches_of(config, team)  # fails where they cannot be shared out
        team.check_same(json.dumps(config.to_dict()), "by its config")
        self.device = choose_device(self.train.device, team.local)
        configure_cpu_(config, self.device)
        self.on_progress = on_progress
        self._schedule = Schedule(
            self.train.steps,
            self.train.warmup,
            self.train.cooldown,
            self.train.saturation,
            config.compress.lr,
            self.train.lr_min,
        )
        self._losses: list[Tensor] = []
        self.folder: RunFolderBase = ReadOnlyRunFolder(out)
        team.on_rank0(lambda: self._open(existing))
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.folder.close)
            resume = existing == "resume"
            self.state = RunState(config, self.device, self.folder, team, resume)
            on_failure.pop_all()

    def _open(self, existing: Existing) -> None:
        # Data that cannot be read must not cost a run that is in the folder already.
        for stream in (TRAINING, EVALUATION):
            self.task.batch(1, Draw(self.train.seed, 0, stream), self.device)
        if (target := self.config.target.loss) < 0:
            _log.warning(
                "warning: target.loss = %g is below zero, where no cross-entropy or squared error "
                "ever comes",
                target,
            )
        self.folder = RunFolder.open(self.folder.path, existing)

    @property
    def model(self) -> Transformer:
        return self.state.model

    @property
    def compressor(self) -> Compressor:
        return self.state.compressor

    @property
    def memory(self) -> Memory:
        return self.state.memory

    @property
    def schedule(self) -> Schedule:
        second_anneal_steps = self.memory.second_anneal_steps
        return self._schedule.again(second_anneal_steps) if second_anneal_steps else self._schedule

    @property
    def _end(self) -> int:
        """The number of steps of the whole run, as far as it is known."""
        ended_at, frozen_at = self.memory.ended_at, self.memory.frozen_at
        return self.schedule.end(frozen_at) if ended_at is None else ended_at

    # --- one step -----------------------------------------------------------------

    def _step(self) -> Event | None:
        step, frozen_at = self.compressor.steps, self.memory.frozen_at
        pressing = self.schedule.phase(step, frozen_at) == "compression"
        self.compressor.set_pressure_(pressing * watch.pressure(self.memory.returns))
        self.compressor.set_lr_(self.schedule.rate(step, frozen_at))
        self.state.step.load_(step)
        self.state.step()
        self._losses.append(self.state.step.loss.clone())
        self.memory.training_fma += self.compressor.fma
        event = self.compressor.finish_step_()
        if event is not None:
            self.folder.append("events.jsonl", event.to_dict())
            if event.dropped:
                self.memory.cut_at = self.compressor.steps
        return event

    def evaluate(self, batches: int) -> tuple[float, float]:
        """Mean loss and metric on the held-out stream."""
        loss, metric = evaluate(self.model, self.config, batches, self.device, self.team)
        self.model.train()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()  # what is left in use is what training needs
        return loss, metric

    # --- the run ------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the summary that is also in the folder.

        Asked to stop by SIGTERM or Ctrl-C, it saves and raises Stopped.
        """
        with contextlib.closing(self.folder), stop_requests() as request:
            while True:
                self._train(request)
                with self._breakable(request):
                    summary = self._summary()
                    go_on = next_attempt(self.state, summary)
                if go_on is None:
                    return self._finish(summary)
                self.folder.reopen()
                go_on()

    def _breakable(self, request: StopRequest) -> contextlib.AbstractContextManager[None]:
        """Around what only looks: who trains alone may leave anywhere, of ranks none may."""
        if self.team.size > 1:
            return contextlib.nullcontext()
        return request.interruptible(self._resumable_message())

    def _train(self, request: StopRequest) -> None:
        began = time.perf_counter() - self.memory.wall_s
        mark, marked_step = time.perf_counter(), self.compressor.steps
        while self.compressor.steps < self._end:
            self._step()
            stopping = self._is_stopping(request)
            due = any(self._due(key) for key in ("log", "eval", "checkpoint"))
            if not stopping and not due:
                continue
            self._read_losses()
            if due:
                self.compressor.scalars.reset_streak_()
                if self.state.streak >= self.train.skip_limit:
                    self._return_from_failure("loss or gradient not a number")
            step_s = (time.perf_counter() - mark) / (self.compressor.steps - marked_step)
            if self._due("eval"):
                _, metric = self.evaluate(self.train.eval_batches)
                self.memory.metric = metric if math.isfinite(metric) else None
            self.memory.wall_s = time.perf_counter() - began
            if self._due("log"):
                self._log(step_s)
                self._watch()
            # After the log, which may find the work target met and so this step the last.
            owed = due and self._owes_checkpoint()
            if stopping or owed:
                self._save(owed, stopping)
            if stopping:
                raise request.stopped(self._resumable_message())
            mark, marked_step = time.perf_counter(), self.compressor.steps

    def _is_stopping(self, request: StopRequest) -> bool:
        """Whether to stop after this step: alike on all ranks, so each must have told the others.

        A GPU is asked only when it is waited for anyway.
        """
        if self.team.size == 1:
            return request.asked
        known = self.device == "cpu" or self._due("log")
        stopping = known and bool(self.compressor.stop_requested)
        if request.asked:
            self.compressor.stop_requested.fill_(1.0)  # goes out with the next step
        return stopping

    def _finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        if shown := samples(self.model, self.config, self.device):
            self.folder.write_arrays("samples.npz", shown)
        self.folder.write("summary.json", summary)
        best, target = self.memory.best_loss, self.config.target.loss
        if not summary["held"] and (best is None or best > target):
            raise TargetMissed(missed_message(self.state, summary))
        return summary

    def _resumable_message(self) -> str:
        return (
            f"after step {self.compressor.steps}, which is saved in "
            f"{str(self.folder.checkpoints)!r}; go on with --resume"
        )

    def _due(self, what: str) -> bool:
        """Whether this step is one of every `what`_every, or the last."""
        step = self.compressor.steps
        return step == self._end or bool(step % getattr(self.train, f"{what}_every") == 0)

    def _owes_checkpoint(self) -> bool:
        """Whether one is due, or was while steps failed; an anneal may have to start once more.

        And the first row within the target has one of its own: there is to be a way back to it.
        """
        step, every, memory = self.compressor.steps, self.train.checkpoint_every, self.memory
        begun = memory.frozen_at is not None and memory.saved_at < memory.frozen_at
        first = not memory.held and memory.pending_step is None and memory.open_at == step
        reached = first and memory.holds(self.config.target.loss)
        return step == self._end or begun or reached or step // every > memory.saved_at // every

    def _save(self, owed: bool, stopping: bool) -> None:
        failing = self.state.failing
        if failing and not (stopping or self.compressor.steps == self._end):
            return  # until a step succeeds; the one before stays
        if failing:
            self.compressor.forget_energies_()
        if not self.compressor.finite():
            self._return_from_failure("a weight is not a number")
        elif owed and not failing:
            self._note_checkpoint()
        self.state.save()

    def _note_checkpoint(self) -> None:
        """What the checkpoint that is to be written may be good for."""
        memory, target = self.memory, self.config.target.loss
        step, fma = self.compressor.steps, self.compressor.fma
        memory.saved_at = step
        if not watch.lost(memory, target):
            memory.fallback_step = step
        if not memory.holds(target):
            return
        if step == memory.frozen_at:
            memory.hold_(step, fma)  # seen: no event has been since the last row began
        elif memory.pending_step is None:
            memory.pending_step, memory.pending_fma = step, fma

    def _compressing(self) -> bool:
        """Whether the last step was one of the compression phase."""
        last = self.compressor.steps - 1
        return self.schedule.phase(last, self.memory.frozen_at) == "compression"

    # --- going back ---------------------------------------------------------------

    def _watch(self) -> None:
        """Off target for too long, go back to a state that held it."""
        memory, every = self.memory, self.train.log_every
        watch.note_(memory, self.config.target.loss, self._compressing(), every)
        if not 0 < self.train.patience <= memory.steps_off_target:
            return
        if held := self.state.first_intact(watch.choices(memory)):
            why = f"loss off its target for {memory.steps_off_target} steps, pressure halved"
            self.state.roll_back(held, why)
        else:
            memory.held_at = memory.held_before_at = None

    def _return_from_failure(self, what: str) -> None:
        steps = self.compressor.steps
        why = f"{what} at step {steps} (batch seed {self.state.step.draw(steps - 1).seed})"
        memory, fallback_steps = self.memory, watch.fallback_steps(self.memory)
        if memory.frozen_at == steps:
            memory.frozen_at = None  # not to be, then
        if not self._compressing():
            small = small_enough(self.state, fallback_steps)
            fallback_steps.sort(key=lambda step: step not in small)
        found = self.state.first_intact(fallback_steps) or self.state.newest()
        if found is None or memory.failed_returns >= watch.TRIES:
            if end_early(self.state, why):
                return
            good = f"last good checkpoint: {str(found.path)!r}" if found else "no checkpoint yet"
            raise UserError(f"{why}; {good}. Lower compress.lr, or try another seed")
        memory.failed_returns += 1
        self.state.roll_back(found, why)

    def _read_losses(self) -> None:
        """Take in the losses since the last look, and how many steps were skipped."""
        compressor, memory = self.compressor, self.memory
        memory.hear_(torch.stack(self._losses).tolist(), compressor.steps, self.config.target.loss)
        skipped, self.state.failing, self.state.streak = compressor.scalars.counts()
        if skipped - memory.skipped < len(self._losses):
            memory.failed_returns = 0
        memory.skipped = skipped
        self._losses.clear()

    def _maybe_freeze(self, loss: float) -> None:
        """The work target is met and the loss held: freeze the structure, start the anneal.

        A row that began before the last cut says nothing of what the cut has left. And there
        is to be a checkpoint of it, which there is not where a step has just failed.
        """
        memory = self.memory
        phase = self.schedule.phase(self.compressor.steps, memory.frozen_at)
        met = (
            self.compressor.work_target_met
            and memory.row_at >= memory.cut_at
            and not self.state.failing
        )
        if phase == "compression" and met and loss <= self.config.target.loss:
            memory.frozen_at = self.compressor.steps

    def _log(self, step_s: float) -> None:
        step = self.compressor.steps
        self.memory.close_row_(step)
        if self.memory.loss is None:
            return
        self._maybe_freeze(self.memory.loss)
        frozen_at = self.memory.frozen_at
        phase = self.schedule.phase(step - 1, frozen_at)
        lr = self.schedule.rate(step - 1, frozen_at)
        name = self.task.metric_name
        row = metrics_row(self.compressor, self.model, self.memory, name, phase, lr, step_s)
        self.folder.append("metrics.jsonl", row)
        if self.on_progress is not None:
            end = self._end
            self.on_progress(
                Progress(
                    row,
                    end,
                    self.config.target.loss,
                    self.memory.fma_initial,
                    self.task.metric_name,
                    (end - step) * step_s,
                )
            )

    def _summary(self) -> dict[str, Any]:
        loss, metric, figures = final(self.state, self.model)
        self.model.train()
        return summary(
            self.config, self.device, self.compressor, self.memory, loss, metric, figures
        )
