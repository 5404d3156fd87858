"""A run's books: what it remembers, what it logs, and what it says of itself at the end."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from gaugelasso.compressor import Compressor
from gaugelasso.config import Config
from gaugelasso.drop import next_to_go
from gaugelasso.evaluation import in_bfloat16
from gaugelasso.models import Transformer


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
FRESH: dict[str, Any] = {
    "frozen_at": None,
    "reached_at": None,
    "best_loss": math.inf,
    "loss": None,  # mean of the last row
    "metric": None,
    "unlogged": (),
    "training_fma": 0.0,
    "wall_s": 0.0,
    "fma_initial": None,
    "parameters_initial": None,
    "cut_at": 0,  # when the structure became what it is
    "hoped_at": None,  # a checkpoint that held the target: the steps after it will tell
    "held_at": None,  # the last one that did hold it
    "held_before_at": None,  # and the one before that
    "tried_at": None,  # of these, the one that was last gone back to
    "ended_at": None,  # when the run took up a held state as its last
    "again_at": None,  # when a second anneal began
    "off_for": 0,  # steps since the loss left its target
    "returns": 0,
    "in_vain": 0,  # of these, since a step was last taken
    "skipped": 0,
}


def metrics_row(
    compressor: Compressor,
    model: Transformer,
    state: dict[str, Any],
    metric_name: str,
    phase: str,
    lr: float,
    step_s: float,
) -> dict[str, Any]:
    """A row of metrics.jsonl."""
    row = {
        "step": compressor.steps,
        "phase": phase,
        "loss": state["loss"],
        metric_name: state["metric"],
        "fma": compressor.fma,
        "parameters": compressor.parameters,
        "sites": len(model.sites),
        "operators": len(model.operators),
        "rho": float(compressor.rho),
        "lr": lr,
        "step_ms": 1000 * step_s,
        "wall_s": state["wall_s"],
        "skipped": state["skipped"],
    }
    if compressor.rho.is_cuda:
        row["memory_mib"] = torch.cuda.memory_reserved() / 2**20
    return row


def summary(
    config: Config,
    device: str,
    compressor: Compressor,
    state: dict[str, Any],
    loss: float,
    metric: float,
    figures: dict[str, float],
) -> dict[str, Any]:
    """summary.json: `loss`, `metric` and `figures` are held-out.

    `structure_step` is when the structure became what it is, `held_step` the last checkpoint
    under pressure that held the loss target in training, before it and after.
    """
    target = config.target.loss
    return {
        "task": config.task_name,
        "seed": config.train.seed,
        "steps": compressor.steps,
        "accounting": config.compress.accounting,
        "fma_initial": state["fma_initial"],
        "fma_final": compressor.fma,
        "compression": state["fma_initial"] / compressor.fma,
        "loss_target": target,
        "loss": loss,
        "held": loss <= target,
        "metric": {"name": config.task.metric_name, "value": metric},
        "figures": figures,
        "target_reached_step": state["reached_at"],
        "frozen_step": state["frozen_at"],
        "structure_step": state["cut_at"],
        "held_step": state["held_at"],
        "returns": state["returns"],
        "skipped_steps": state["skipped"],
        "training_fma": state["training_fma"],
        "parameters_initial": state["parameters_initial"],
        "parameters_final": compressor.parameters,
        "wall_s": state["wall_s"],
        "device": device,
        "precision": "bfloat16" if in_bfloat16(config, device) else "float32",
        "widths": compressor.widths,
        "next_to_go": next_to_go(compressor.table, compressor.utility(), compressor.prices),
        "structure": compressor.structure,
    }
