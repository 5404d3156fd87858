"""A run's figures: what a checkpoint keeps of them, what is logged, and the summary at the end.

Keeps account and decides nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from gaugelasso.axes import Compressible
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.compress.drop import next_to_go
from gaugelasso.config import Config
from gaugelasso.runs.structures import describe
from gaugelasso.training.evaluation import HeldOut, in_bfloat16


@dataclass
class RunRecord:
    """Figures so far. Fields that end in `_at` are steps.

    The loss of a logging interval is the mean over its steps.
    """

    reached_at: int | None = None  # the first step whose loss was within its target
    first_loss: float | None = None
    best_loss: float | None = None  # the least of all intervals
    loss: float | None = None  # of the last interval; None if none of its steps had a finite loss
    metric: float | None = None
    unlogged: list[float] = field(default_factory=list)  # losses of the present interval
    training_fma: float = 0.0
    wall_s: float = 0.0
    fma_initial: float = 0.0
    parameters_initial: int = 0
    cut_at: int = 0  # when the structure last changed
    row_at: int = 0  # where the last interval began
    open_at: int = 0  # where the present one began
    skipped: int = 0

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return asdict(self)

    def load_(self, values: Mapping[str, Any]) -> None:
        """Take over what `to_dict` gave."""
        for name in self.to_dict():
            setattr(self, name, values[name])

    def add_losses_(self, losses: Sequence[float], steps: int, target: float | None) -> None:
        """Take in the losses of the last steps, of `steps` in all; None without a target loss."""
        numbered = enumerate(losses, steps - len(losses) + 1)
        finite = [(step, loss) for step, loss in numbered if math.isfinite(loss)]
        if self.reached_at is None and target is not None:
            self.reached_at = next((step for step, loss in finite if loss <= target), None)
        if self.first_loss is None and finite:
            self.first_loss = finite[0][1]
        self.unlogged = [*self.unlogged, *(loss for _, loss in finite)]

    def close_interval_(self, step: int) -> None:
        """A logging interval ends with this step."""
        self.row_at, self.open_at = self.open_at, step
        self.loss = sum(self.unlogged) / len(self.unlogged) if self.unlogged else None
        if self.loss is not None:
            self.best_loss = self.loss if self.best_loss is None else min(self.best_loss, self.loss)
        self.unlogged = []

    def holds(self, target: float) -> bool:
        """Whether the last interval's loss is within its target."""
        return self.loss is not None and self.loss <= target

    def discard_losses_(self, cut_at: int) -> None:
        """The run went back to a structure of step `cut_at`: the losses were of another state."""
        self.loss, self.unlogged, self.cut_at = None, [], cut_at


@dataclass(frozen=True)
class Progress:
    """What a display shows: one row of metrics.jsonl and its context."""

    row: dict[str, Any]
    end: int
    loss_target: float | None
    fma_initial: float
    metric_name: str
    seconds_left: float
    metric_target: float | None = None
    fma_target: float = 0.0  # 0: none
    accounting: str = "fma"
    pressed_loss: float | None = None  # what the last step pressed towards

    @property
    def compression(self) -> float:
        """How many times less work; infinite if no work is left."""
        return self.fma_initial / self.row["fma"] if self.row["fma"] else math.inf


def metrics_row(
    compressor: Compressor,
    model: Compressible,
    record: RunRecord,
    metric_name: str,
    phase: str,
    lr: float,
    step_s: float,
) -> dict[str, Any]:
    """A row of metrics.jsonl."""
    row = {
        "step": compressor.steps,
        "phase": phase,
        "loss": record.loss,
        metric_name: record.metric,
        "fma": compressor.fma,
        "parameters": compressor.parameters,
        **model.counts(),
        "rho": float(compressor.rho),
        "lr": lr,
        "step_ms": 1000 * step_s,
        "wall_s": record.wall_s,
        "skipped": record.skipped,
    }
    if compressor.rho.is_cuda:
        row["memory_mib"] = torch.cuda.memory_reserved() / 2**20
    return row


@dataclass(frozen=True)
class About:
    """What a summary says of a run that its figures do not."""

    task: str
    seed: int
    metric_name: str
    device: str
    precision: str
    method: str = "compression"


@dataclass(frozen=True)
class Outcome:
    """What was measured at the end. `judged`: what was named, the loss, and whether it is held."""

    judged: dict[str, Any]
    metric: float
    figures: dict[str, float]
    evaluated_on: str
    selection_loss: float


def summary(
    about: About,
    compressor: Compressor,
    record: RunRecord,
    numbers: Mapping[str, Any],
    outcome: Outcome,
) -> dict[str, Any]:
    """summary.json, of every run.

    `structure_step` is when the structure last changed, `held_step` the last checkpoint that
    held the loss target in training before and after it, or the one that the run ended on.
    `numbers` are what a checkpoint keeps of the run's driver.
    """
    return {
        "task": about.task,
        "method": about.method,
        "seed": about.seed,
        "steps": compressor.steps,
        "accounting": compressor.options.accounting,
        "fma_initial": record.fma_initial,
        "fma_final": compressor.fma,
        "compression": record.fma_initial / compressor.fma if compressor.fma else None,
        "costs": compressor.state.costs(),
        **outcome.judged,
        "metric": {"name": about.metric_name, "value": finite(outcome.metric)},
        "figures": outcome.figures,
        "evaluated_on": outcome.evaluated_on,
        "selection_loss": finite(outcome.selection_loss),
        "target_reached_step": record.reached_at,
        "frozen_step": numbers["frozen_at"],
        "structure_step": record.cut_at,
        "held_step": numbers["held_at"],
        "returns": numbers["returns"],
        "skipped_steps": record.skipped,
        "training_fma": record.training_fma,
        "parameters_initial": record.parameters_initial,
        "parameters_final": compressor.parameters,
        "wall_s": record.wall_s,
        "device": about.device,
        "precision": about.precision,
        "widths": compressor.widths,
        "next_to_go": next_to_go(compressor.state.table, compressor.utility(), compressor.prices),
        **describe(compressor.model),
    }


def about_run(config: Config, device: str, given_structure: bool = False) -> About:
    """What a summary says of a run of the trainer.

    Its method is compression, or without pressure plain training: of the uniform model, or of a
    given structure from scratch.
    """
    precision = "bfloat16" if in_bfloat16(config, device) else "float32"
    plain = "from scratch" if given_structure else "plain"
    method = plain if config.compress.has_no_pressure else "compression"
    name = config.task.metric_name
    return About(config.task_name, config.train.seed, name, device, precision, method)


def outcome_of(
    config: Config, compressor: Compressor, test: HeldOut, selection: HeldOut
) -> Outcome:
    """The outcome on test data; `selection` decided."""
    judged = _judged(config, compressor, test, selection)
    return Outcome(judged, test.metric, test.figures, "test", selection.loss)


def _judged(
    config: Config, compressor: Compressor, test: HeldOut, selection: HeldOut
) -> dict[str, Any]:
    """What was named, the loss, and whether the run has what was named."""
    target, loss = config.target, finite(test.loss)
    named, lower_is_better = target.named, config.task.metric_lower_is_better
    if target.metric is not None:
        bound = math.inf if named is None else named
        reach = MetricTarget(target.metric, lower_is_better, loss=bound)
        return {
            "loss_target": named,
            "metric_target": target.metric,
            "loss": loss,
            "held": reach.both_met(test.loss, selection.metric),
            "selection_metric": finite(selection.metric),
        }
    if target.kind == "fma":
        goal = {"fma_target": target.fma, "selection_metric": finite(selection.metric)}
        return {"loss_target": None, **goal, "loss": loss, "held": compressor.work_target_met}
    held = named is None or test.loss <= named
    if not target.fma:
        return {"loss_target": named, "loss": loss, "held": held}
    both = held and compressor.work_target_met
    return {"loss_target": named, "fma_target": target.fma, "loss": loss, "held": both}


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
