"""The trainer: one run from config to summary.

Drives the compressor through the phases, evaluates on held-out data, writes the run
folder. Decides nothing about structure.
"""

import contextlib
import dataclasses
import gc
import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugelasso import checkpoint, watch
from gaugelasso.books import Progress, metrics_row, summary
from gaugelasso.config import Config
from gaugelasso.errors import UserError, errors_of
from gaugelasso.evaluation import choose_device, evaluate, final_figures, samples, settle_cpu_
from gaugelasso.events import Event
from gaugelasso.memory import Memory
from gaugelasso.models import Transformer
from gaugelasso.ranks import ALONE, Team
from gaugelasso.resume import check_same_config, check_state
from gaugelasso.runs import Existing, Onlooker, RunFolder, environment
from gaugelasso.schedule import Schedule
from gaugelasso.signals import StopWish, stop_wishes
from gaugelasso.step import TrainingStep, micros_of
from gaugelasso.tasks import EVALUATION, TRAINING, Draw

_logger = logging.getLogger(__name__)


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
        micros_of(config, team)  # fails where they cannot be shared out
        team.agree(json.dumps(config.to_dict()), "by its config")
        self.device = choose_device(self.train.device, team.local)
        settle_cpu_(config, self.device)
        self.on_progress = on_progress
        self.folder: RunFolder = Onlooker(out)
        team.lead(lambda: self._open(existing))
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.folder.close)
            self._set_up(existing == "resume")
            on_failure.pop_all()

    def _open(self, existing: Existing) -> None:
        # Data that cannot be read must not cost a run that is in the folder already.
        for stream in (TRAINING, EVALUATION):
            self.task.batch(1, Draw(self.train.seed, 0, stream), self.device)
        self.folder = RunFolder.open(self.folder.path, existing)

    def _set_up(self, resume: bool) -> None:
        config = self.config
        self._schedule = Schedule(
            self.train.steps,
            self.train.warmup,
            self.train.cooldown,
            self.train.saturation,
            config.compress.lr,
            self.train.lr_min,
        )
        self.memory = Memory()
        found = self._find() if resume else None
        if found:
            path = self.folder.path / "config.json"
            self.team.lead(lambda: check_same_config(config, path))
            model = found.model(self.device)
        else:
            spec = config.model.spec(self.task)
            model = Transformer(spec, self.train.seed).to(self.device)
        self._take_up(model)
        if found:
            self._resume(found)
        else:
            self._begin()
        self._losses: list[Tensor] = []
        self._failing = self._streak = 0
        self.compressor.agree("at the start")

    def _find(self, step: int | None = None) -> checkpoint.Checkpoint | None:
        """The newest checkpoint, or that of a step, found by rank 0 for all."""

        def look() -> tuple[str, int] | None:
            folder = self.folder.checkpoints
            found = checkpoint.find(folder) if step is None else checkpoint.at_step(folder, step)
            return (found.path.name, found.step) if found else None

        told = self.team.lead(look)
        return checkpoint.Checkpoint(self.folder.checkpoints / told[0], told[1]) if told else None

    def _take_up(self, model: Transformer) -> None:
        self.model = model
        self.step = TrainingStep(model, self.config, self.device, self.team)
        self.compressor = self.step.compressor

    @property
    def schedule(self) -> Schedule:
        return self._schedule if self.memory.again_at is None else self._schedule.again()

    def _begin(self) -> None:
        # Nothing here draws from torch's own generators, but a task of somebody's might.
        torch.manual_seed(self.train.seed)
        compressor = self.compressor
        self.memory.fma_initial = compressor.fma
        self.memory.parameters_initial = compressor.parameters
        self.folder.write("config.json", self.config.to_dict())
        self.folder.write("environment.json", environment(self.device) | {"ranks": self.team.size})
        self.folder.rewind(0)
        task = self.task
        metric = {"name": task.metric_name, "lower_is_better": task.metric_lower_is_better}
        initial = {"metric": metric, "fma": compressor.fma, "widths": compressor.widths}
        self.folder.write("initial.json", {**initial, "structure": compressor.structure})

    def _resume(self, found: checkpoint.Checkpoint) -> None:
        state, tensors = found.state()
        steps = state.pop("steps")
        check_state(state, dataclasses.asdict(Memory()), steps, found.path / "state.json")
        self.memory = Memory(**state)
        with errors_of(found.path / "optimizer.safetensors"):
            self.compressor.load_state_tensors_(tensors, steps)
        self.folder.rewind(steps, self.memory.returns)
        found.restore_random_()

    # --- one step -----------------------------------------------------------------

    def _step(self) -> Event | None:
        step, frozen_at = self.compressor.steps, self.memory.frozen_at
        pressing = self.schedule.phase(step, frozen_at) == "compression" and not self._spent()
        self.compressor.press_(pressing * watch.pressure(self.memory.returns))
        self.compressor.set_lr_(self.schedule.rate(step, frozen_at))
        self.step.load_(step)
        self.step()
        self._losses.append(self.step.loss.clone())
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
        with contextlib.closing(self.folder), stop_wishes() as wish:
            while True:
                self._train(wish)
                with wish.granted_at_once(self._said_resumable()):
                    summary = self._summary()
                    if not self._goes_on(summary):
                        return self._finish(summary)

    def _train(self, wish: StopWish) -> None:
        began = time.perf_counter() - self.memory.wall_s
        mark, marked_step = time.perf_counter(), self.compressor.steps
        while self.compressor.steps < self.schedule.end(self.memory.frozen_at):
            self._step()
            stopping = self._is_stopping(wish)
            due = any(self._due(key) for key in ("log", "eval", "checkpoint"))
            if not stopping and not due:
                continue
            self._read_losses()
            if due:
                self.compressor.pace.looked_()
                if self._streak >= self.train.skip_limit:
                    self._return_from_failure()
            step_s = (time.perf_counter() - mark) / (self.compressor.steps - marked_step)
            if self._due("eval"):
                _, metric = self.evaluate(self.train.eval_batches)
                self.memory.metric = metric if math.isfinite(metric) else None
            self.memory.wall_s = time.perf_counter() - began
            if self._due("log"):
                self._log(step_s)
                self._watch()
            # After the log, which may find the work target met and so this step the last.
            if stopping or self._due("checkpoint"):
                self._save()
            if stopping:
                raise wish.stopped(self._said_resumable())
            mark, marked_step = time.perf_counter(), self.compressor.steps

    def _is_stopping(self, wish: StopWish) -> bool:
        """Whether to stop after this step: alike on all ranks, so each must have told the others.

        A GPU is asked only when it is waited for anyway.
        """
        if self.team.size == 1:
            return wish.asked
        known = self.device == "cpu" or self._due("log")
        stopping = known and bool(self.compressor.wish)
        if wish.asked:
            self.compressor.wish.fill_(1.0)  # goes out with the next step
        return stopping

    def _finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        if shown := samples(self.model, self.config, self.device):
            self.folder.write_arrays("samples.npz", shown)
        self.folder.write("summary.json", summary)
        if self.memory.reached_at is None:
            raise TargetMissed(self._said_missed(summary))
        return summary

    def _said_resumable(self) -> str:
        return (
            f"after step {self.compressor.steps}, which is saved in "
            f"{str(self.folder.checkpoints)!r}; go on with --resume"
        )

    def _due(self, what: str) -> bool:
        """Whether this step is one of every `what`_every, or the last."""
        step, frozen_at = self.compressor.steps, self.memory.frozen_at
        last = step == self.schedule.end(frozen_at)
        # A second anneal may have to start where the first one did.
        freezing = what == "checkpoint" and step == frozen_at
        return last or freezing or step % getattr(self.train, f"{what}_every") == 0

    def _save(self) -> None:
        memory, steps = self.memory, self.compressor.steps
        due = self._due("checkpoint")
        if self._failing:
            if due and steps < self.schedule.end(memory.frozen_at):
                return  # until a step succeeds; the one before stays
            self.compressor.forget_energies_()
        if not self.compressor.finite():
            raise UserError(f"a weight is not a number after step {steps}; {self._last_good()}")
        if due and memory.holds(self.config.target.loss) and self._compressing():
            memory.hoped_at = steps
        self.folder.sync()
        spare = [at for at in (memory.hoped_at, memory.held_at, memory.held_before_at) if at]
        keep = self.train.checkpoint_keep
        folder, state = self.folder.checkpoints, dataclasses.asdict(memory)
        self.team.lead(lambda: checkpoint.save(folder, self.compressor, state, keep, spare))

    def _compressing(self) -> bool:
        """Whether the last step was one of the compression phase."""
        last = self.compressor.steps - 1
        return self.schedule.phase(last, self.memory.frozen_at) == "compression"

    # --- going back ---------------------------------------------------------------

    def _watch(self) -> None:
        """Off target for too long, go back to a state that held it."""
        memory, every = self.memory, self.train.log_every
        pressed = self._compressing()
        watch.note_(memory, self.compressor.steps, self.config.target.loss, pressed, every)
        if 0 < self.train.patience <= memory.off_for and (held := self._held()):
            self._go_back(held, f"loss off its target for {memory.off_for} steps")

    def _held(self) -> checkpoint.Checkpoint | None:
        """The state to go back to, of those that held the target."""
        while (step := watch.choose_(self.memory)) is not None:
            try:
                return self._find(step)
            except UserError as error:
                _logger.warning("warning: %s; it held the target, but is no more", error)
                watch.forget_(self.memory)
        return None

    def _return_from_failure(self) -> None:
        steps = self.compressor.steps
        seed = self.step.draw(steps - 1).seed
        why = f"loss or gradient not a number at step {steps} (batch seed {seed})"
        found = self._find()
        if found is None or self.memory.in_vain >= watch.TRIES:
            raise UserError(f"{why}; {self._last_good()}. Lower compress.lr, or try another seed")
        self.memory.in_vain += 1
        self._go_back(found, why)

    def _goes_on(self, summary: dict[str, Any]) -> bool:
        """Whether the end is not the end: the anneal lost the target, in training too.

        It is done once more from where the target was held. If that is no better, the run ends on
        the state that held it, as it was.
        """
        memory, target = self.memory, self.config.target.loss
        if summary["loss"] <= target or memory.holds(target) or memory.ended_at is not None:
            return False
        held = self._held()
        if held is None:
            return False
        why = f"held-out loss {summary['loss']:.4g} after the anneal"
        if memory.again_at is None:
            self._go_back(held, why)
            memory.again_at = memory.frozen_at = self.compressor.steps
            return True
        batches = self.train.final_batches
        model = held.model(self.device)
        loss, _ = evaluate(model, self.config, batches, self.device, self.team)
        if not loss < summary["loss"]:
            return False
        self._go_back(held, why)
        memory.ended_at = self.compressor.steps
        self._save()
        return True

    def _go_back(self, to: checkpoint.Checkpoint, why: str) -> None:
        """Take up an earlier state and go on from it, at the step that training has come to."""
        began, memory, steps = time.perf_counter(), self.memory, self.compressor.steps
        hooks, history = self.compressor.hooks, self.compressor.history
        fma = self.compressor.fma
        past, tensors = to.state()
        # Gone before the other comes, so that no more memory is taken than in training.
        del self.model, self.step, self.compressor
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
        self._take_up(to.model(self.device))
        compressor = self.compressor
        compressor.load_state_tensors_(tensors, steps)
        compressor.hooks, compressor.history = hooks, history
        compressor.pace.recount_(memory.skipped)
        self._failing = self._streak = 0
        memory.returns += 1
        memory.cut_at = past["cut_at"]
        # What was known is of a state that is no more.
        memory.off_for, memory.hoped_at, memory.loss, memory.unlogged = 0, None, None, []
        spent = time.perf_counter() - began
        event = Event.returned(steps, to.step, fma, compressor.fma, compressor.widths, spent)
        history.append(event)
        self.folder.append("events.jsonl", event.to_dict())
        compressor.agree(f"back at the state of step {to.step}")
        _logger.warning("warning: %s; back to the state of step %d, pressure halved", why, to.step)

    def _said_missed(self, summary: dict[str, Any]) -> str:
        whole = summary["fma_final"] == summary["fma_initial"]
        kept = "nothing was compressed, the full model" if whole else "the model as it ended"
        return (
            f"target.loss = {self.config.target.loss} was never reached in "
            f"{summary['steps']} steps "
            f"(best training loss {self.memory.best_loss:.4g}): {kept} is in "
            f"{str(self.folder.checkpoints)!r}. Raise target.loss or train.steps"
        )

    def _read_losses(self) -> None:
        """Take in the losses since the last look, and how many steps were skipped."""
        compressor, memory = self.compressor, self.memory
        memory.hear_(torch.stack(self._losses).tolist(), compressor.steps, self.config.target.loss)
        self._losses.clear()
        memory.skipped, self._failing, self._streak = compressor.pace.counts()
        if not self._failing:
            memory.in_vain = 0

    def _last_good(self) -> str:
        good = checkpoint.find(self.folder.checkpoints)
        return f"last good checkpoint: {str(good.path)!r}" if good else "no checkpoint yet"

    def _spent(self) -> bool:
        """Whether there is a work target, and it is met.

        From then on nothing presses: pressure that comes with every lucky batch would keep the
        mean loss above its target, and the anneal would never begin.
        """
        return 0 < self.compressor.fma <= self.config.target.fma

    def _maybe_freeze(self, loss: float) -> None:
        """The work target is met and the loss held: freeze the structure, start the anneal."""
        phase = self.schedule.phase(self.compressor.steps, self.memory.frozen_at)
        if phase == "compression" and self._spent() and loss <= self.config.target.loss:
            self.memory.frozen_at = self.compressor.steps

    def _log(self, step_s: float) -> None:
        step = self.compressor.steps
        self.memory.close_row_()
        loss = self.memory.loss
        if loss is None:
            if self._failing:
                self._return_from_failure()
            return
        self._maybe_freeze(loss)
        frozen_at = self.memory.frozen_at
        phase = self.schedule.phase(step - 1, frozen_at)
        lr = self.schedule.rate(step - 1, frozen_at)
        name = self.task.metric_name
        row = metrics_row(self.compressor, self.model, self.memory, name, phase, lr, step_s)
        self.folder.append("metrics.jsonl", row)
        if self.on_progress is not None:
            end = self.schedule.end(frozen_at)
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
        loss, metric = self.evaluate(self.train.final_batches)
        batches = self.train.final_batches
        figures = self.team.lead(
            lambda: final_figures(self.model, self.config, batches, self.device)
        )
        loss, metric = figures.pop("loss", loss), figures.pop(self.task.metric_name, metric)
        return summary(
            self.config, self.device, self.compressor, self.memory, loss, metric, figures
        )
