"""The trainer: one run from config to summary.

Drives the compressor through the phases, evaluates on held-out data, writes the run
folder. Decides nothing about structure.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugelasso import checkpoint
from gaugelasso.config import Config
from gaugelasso.drop import next_to_go
from gaugelasso.errors import UserError, errors_of
from gaugelasso.evaluation import (
    choose_device,
    evaluate,
    final_figures,
    in_bfloat16,
    samples,
)
from gaugelasso.events import Event
from gaugelasso.models import Transformer
from gaugelasso.resume import check_same_config, check_state
from gaugelasso.runs import Existing, RunFolder, environment
from gaugelasso.schedule import Schedule
from gaugelasso.signals import StopWish, stop_wishes
from gaugelasso.step import TrainingStep
from gaugelasso.tasks import EVALUATION, TRAINING, Draw


@dataclass(frozen=True)
class Progress:
    """What a display shows: one row of metrics.jsonl and what surrounds it."""

    row: dict[str, Any]
    end: int
    loss_target: float
    fma_initial: float
    metric_name: str
    seconds_left: float


# What a run remembers beside tensors, as it begins.
_FRESH: dict[str, Any] = {
    "frozen_at": None,
    "reached_at": None,
    "best_loss": math.inf,
    "metric": None,
    "unlogged": (),
    "training_fma": 0.0,
    "wall_s": 0.0,
    "fma_initial": None,
    "parameters_initial": None,
}


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
    ):
        self.config, self.train, self.task = config, config.train, config.task
        self.device = choose_device(self.train.device)
        if self.train.threads:
            torch.set_num_threads(self.train.threads)
        self.on_progress = on_progress
        # Data that cannot be read must not cost a run that is in the folder already.
        for stream in (TRAINING, EVALUATION):
            self.task.batch(1, Draw(self.train.seed, 0, stream), self.device)
        self.folder = RunFolder.open(out, existing)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.folder.close)
            self._set_up(existing == "resume")
            on_failure.pop_all()

    def _set_up(self, resume: bool) -> None:
        config = self.config
        self.schedule = Schedule(
            self.train.steps,
            self.train.warmup,
            self.train.cooldown,
            self.train.saturation,
            config.compress.lr,
            self.train.lr_min,
        )
        self.state: dict[str, Any] = dict(_FRESH)
        found = checkpoint.find(self.folder.checkpoints) if resume else None
        if found:
            check_same_config(self.config, self.folder.path / "config.json")
            model = found.model(self.device)
        else:
            spec = config.model.spec(self.task)
            model = Transformer(spec, self.train.seed).to(self.device)
        self.model = model
        self.step = TrainingStep(model, config, self.device)
        self.compressor = self.step.compressor
        if found:
            self._resume(found)
        else:
            self._begin()
        self._losses: list[Tensor] = []

    def _begin(self) -> None:
        compressor = self.compressor
        self.state["fma_initial"] = compressor.fma
        self.state["parameters_initial"] = compressor.parameters
        self.folder.write("config.json", self.config.to_dict())
        self.folder.write("environment.json", environment(self.device))
        self.folder.rewind(0)
        task = self.task
        metric = {"name": task.metric_name, "lower_is_better": task.metric_lower_is_better}
        initial = {"metric": metric, "fma": compressor.fma, "widths": compressor.widths}
        self.folder.write("initial.json", {**initial, "structure": compressor.structure})

    def _resume(self, found: checkpoint.Checkpoint) -> None:
        state, tensors = found.state()
        steps = state.pop("steps")
        check_state(state, _FRESH, steps, found.path / "state.json")
        self.state = state
        with errors_of(found.path / "optimizer.safetensors"):
            self.compressor.load_state_tensors_(tensors, steps)
        self.folder.rewind(steps)
        found.restore_random_()

    # --- one step -----------------------------------------------------------------

    def _step(self) -> Event | None:
        step, frozen_at = self.compressor.steps, self.state["frozen_at"]
        self.compressor.press_(self.schedule.phase(step, frozen_at) == "compression")
        self.compressor.set_lr_(self.schedule.rate(step, frozen_at))
        self.step.load_(step)
        self.step()
        self._losses.append(self.step.loss.clone())
        self.state["training_fma"] += self.compressor.fma
        event = self.compressor.finish_step_()
        if event is not None:
            self.folder.append("events.jsonl", event.to_dict())
        return event

    def evaluate(self, batches: int) -> tuple[float, float]:
        """Mean loss and metric on the held-out stream."""
        loss, metric = evaluate(self.model, self.config, batches, self.device)
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
            self._train(wish)
            with wish.granted_at_once(self._said_resumable()):
                return self._finish()

    def _train(self, wish: StopWish) -> None:
        began = time.perf_counter() - self.state["wall_s"]
        mark, marked_step = time.perf_counter(), self.compressor.steps
        while self.compressor.steps < self.schedule.end(self.state["frozen_at"]):
            self._step()
            stopping = wish.asked
            if not stopping and not any(self._due(key) for key in ("log", "eval", "checkpoint")):
                continue
            self._read_losses()
            step_s = (time.perf_counter() - mark) / (self.compressor.steps - marked_step)
            if self._due("eval"):
                _, metric = self.evaluate(self.train.eval_batches)
                self.state["metric"] = metric if math.isfinite(metric) else None
            self.state["wall_s"] = time.perf_counter() - began
            if self._due("log"):
                self._log(step_s)
            # After the log, which may find the work target met and so this step the last.
            if stopping or self._due("checkpoint"):
                self._save()
            if stopping:
                raise wish.stopped(self._said_resumable())
            mark, marked_step = time.perf_counter(), self.compressor.steps

    def _finish(self) -> dict[str, Any]:
        summary = self._summary()
        if shown := samples(self.model, self.config, self.device):
            self.folder.write_arrays("samples.npz", shown)
        self.folder.write("summary.json", summary)
        if self.state["reached_at"] is None:
            raise TargetMissed(self._said_missed(summary))
        return summary

    def _said_resumable(self) -> str:
        return (
            f"after step {self.compressor.steps}, which is saved in "
            f"{str(self.folder.checkpoints)!r}; go on with --resume"
        )

    def _due(self, what: str) -> bool:
        """Whether this step is one of every `what`_every, or the last."""
        step = self.compressor.steps
        last = step == self.schedule.end(self.state["frozen_at"])
        return last or step % getattr(self.train, f"{what}_every") == 0

    def _save(self) -> None:
        if not self.compressor.finite():
            raise UserError(
                f"a weight is not a number after step {self.compressor.steps}; {self._last_good()}"
            )
        self.folder.sync()
        checkpoint.save(
            self.folder.checkpoints, self.compressor, self.state, self.train.checkpoint_keep
        )

    def _said_missed(self, summary: dict[str, Any]) -> str:
        whole = summary["fma_final"] == summary["fma_initial"]
        kept = "nothing was compressed, the full model" if whole else "the model as it ended"
        return (
            f"target.loss = {self.config.target.loss} was never reached in "
            f"{summary['steps']} steps "
            f"(best training loss {self.state['best_loss']:.4g}): {kept} is in "
            f"{str(self.folder.checkpoints)!r}. Raise target.loss or train.steps"
        )

    def _read_losses(self) -> list[float]:
        """Take in the losses since the last look, one transfer; UserError if one is not finite."""
        losses = torch.stack(self._losses).tolist()
        self._losses.clear()
        first = self.compressor.steps - len(losses)
        for offset, loss in enumerate(losses):
            if not math.isfinite(loss):
                self._stop_not_finite(first + offset, loss)
            self.state["best_loss"] = min(loss, self.state["best_loss"])
            if self.state["reached_at"] is None and loss <= self.config.target.loss:
                self.state["reached_at"] = first + offset + 1
        self.state["unlogged"] = [*self.state["unlogged"], *losses]
        return losses

    def _stop_not_finite(self, step: int, loss: float) -> None:
        raise UserError(
            f"loss is {loss} at step {step + 1} (batch seed {self.step.draw(step).seed}); "
            f"{self._last_good()}. Lower compress.lr, or try another seed"
        )

    def _last_good(self) -> str:
        good = checkpoint.find(self.folder.checkpoints)
        return f"last good checkpoint: {str(good.path)!r}" if good else "no checkpoint yet"

    def _maybe_freeze(self, loss: float) -> None:
        """The work target is met and the loss held: freeze the structure, start the anneal."""
        target = self.config.target
        compressing = self.schedule.phase(self.compressor.steps, self.state["frozen_at"])
        if not target.fma or compressing != "compression":
            return
        if self.compressor.fma <= target.fma and loss <= target.loss:
            self.state["frozen_at"] = self.compressor.steps

    def _log(self, step_s: float) -> None:
        compressor, step = self.compressor, self.compressor.steps
        losses, self.state["unlogged"] = self.state["unlogged"], []
        loss = sum(losses) / len(losses)
        self._maybe_freeze(loss)
        frozen_at = self.state["frozen_at"]
        row = {
            "step": step,
            "phase": self.schedule.phase(step - 1, frozen_at),
            "loss": loss,
            self.task.metric_name: self.state["metric"],
            "fma": compressor.fma,
            "parameters": compressor.parameters,
            "sites": len(self.model.sites),
            "operators": len(self.model.operators),
            "rho": float(compressor.rho),
            "lr": self.schedule.rate(step - 1, frozen_at),
            "step_ms": 1000 * step_s,
            "wall_s": self.state["wall_s"],
        }
        if self.device.startswith("cuda"):
            row["memory_mib"] = torch.cuda.memory_reserved() / 2**20
        self.folder.append("metrics.jsonl", row)
        if self.on_progress is not None:
            end = self.schedule.end(frozen_at)
            self.on_progress(
                Progress(
                    row,
                    end,
                    self.config.target.loss,
                    self.state["fma_initial"],
                    self.task.metric_name,
                    (end - step) * step_s,
                )
            )

    def _summary(self) -> dict[str, Any]:
        loss, metric = self.evaluate(self.train.final_batches)
        figures = final_figures(self.model, self.config, self.train.final_batches, self.device)
        compressor, state = self.compressor, self.state
        target = self.config.target.loss
        return {
            "task": self.config.task_name,
            "seed": self.train.seed,
            "steps": compressor.steps,
            "accounting": self.config.compress.accounting,
            "fma_initial": state["fma_initial"],
            "fma_final": compressor.fma,
            "compression": state["fma_initial"] / compressor.fma,
            "loss_target": target,
            "loss": figures.pop("loss", loss),
            "metric": {
                "name": self.task.metric_name,
                "value": figures.pop(self.task.metric_name, metric),
            },
            "figures": figures,
            "target_reached_step": state["reached_at"],
            "frozen_step": state["frozen_at"],
            "training_fma": state["training_fma"],
            "parameters_initial": state["parameters_initial"],
            "parameters_final": compressor.parameters,
            "wall_s": state["wall_s"],
            "device": self.device,
            "precision": "bfloat16" if in_bfloat16(self.config, self.device) else "float32",
            "widths": compressor.widths,
            "next_to_go": next_to_go(compressor.table, compressor.utility(), compressor.prices),
            "structure": compressor.structure,
        }
