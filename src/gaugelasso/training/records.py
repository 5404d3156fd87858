"""A run's books: what it logs, and what it says of itself at the end."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.drop import next_to_go
from gaugelasso.config import Config
from gaugelasso.models import Transformer
from gaugelasso.training.evaluation import in_bfloat16
from gaugelasso.training.memory import Memory


@dataclass(frozen=True)
class Progress:
    """What a display shows: one row of metrics.jsonl and what surrounds it."""

    row: dict[str, Any]
    end: int
    loss_target: float
    fma_initial: float
    metric_name: str
    seconds_left: float


def metrics_row(
    compressor: Compressor,
    model: Transformer,
    memory: Memory,
    metric_name: str,
    phase: str,
    lr: float,
    step_s: float,
) -> dict[str, Any]:
    """A row of metrics.jsonl."""
    row = {
        "step": compressor.steps,
        "phase": phase,
        "loss": memory.loss,
        metric_name: memory.metric,
        "fma": compressor.fma,
        "parameters": compressor.parameters,
        "sites": len(model.sites),
        "operators": len(model.operators),
        "rho": float(compressor.rho),
        "lr": lr,
        "step_ms": 1000 * step_s,
        "wall_s": memory.wall_s,
        "skipped": memory.skipped,
    }
    if compressor.rho.is_cuda:
        row["memory_mib"] = torch.cuda.memory_reserved() / 2**20
    return row


def summary(
    config: Config,
    device: str,
    compressor: Compressor,
    memory: Memory,
    loss: float,
    metric: float,
    figures: dict[str, float],
) -> dict[str, Any]:
    """summary.json: `loss`, `metric` and `figures` are held-out.

    `structure_step` is when the structure became what it is, `held_step` the last checkpoint
    that held the loss target in training, before it and after, or the one that the run ended on.
    """
    target = config.target.loss
    return {
        "task": config.task_name,
        "seed": config.train.seed,
        "steps": compressor.steps,
        "accounting": config.compress.accounting,
        "fma_initial": memory.fma_initial,
        "fma_final": compressor.fma,
        "compression": memory.fma_initial / compressor.fma,
        "loss_target": target,
        "loss": loss if math.isfinite(loss) else None,
        "held": loss <= target,
        "metric": {
            "name": config.task.metric_name,
            "value": metric if math.isfinite(metric) else None,
        },
        "figures": figures,
        "target_reached_step": memory.reached_at,
        "frozen_step": memory.frozen_at,
        "structure_step": memory.cut_at,
        "held_step": memory.held_at,
        "returns": memory.returns,
        "skipped_steps": memory.skipped,
        "training_fma": memory.training_fma,
        "parameters_initial": memory.parameters_initial,
        "parameters_final": compressor.parameters,
        "wall_s": memory.wall_s,
        "device": device,
        "precision": "bfloat16" if in_bfloat16(config, device) else "float32",
        "widths": compressor.widths,
        "next_to_go": next_to_go(compressor.state.table, compressor.utility(), compressor.prices),
        "structure": compressor.structure,
    }
