"""Tiny random models to export, after drops on all axes, as the models of finished runs."""

from pathlib import Path
from typing import Any

from gaugelasso.export import Source
from gaugelasso.models import Transformer
from tests.contract.models import Case, make, transformer

TEXT = {"name": "charlm", "length": 24}


def source(
    name: str = "grouped", *, seed: int = 0, task: dict[str, Any] | None = None, **settings: Any
) -> Source:
    """A model with unequal layers: grouped keys, RoPE and learned positions unless set."""
    given = {
        "heads": 4, "kv_heads": 2, "positions": True, "length": 24, "inputs": 11, "outputs": 11,
        "width": 9, "layers": 2,
    } | settings  # fmt: skip
    model = make(Case(transformer(name, **given), dropped=True, seed=seed)).float()
    return of_model(model, task or {"name": "retrieval"})


def of_model(model: Transformer, task: dict[str, Any]) -> Source:
    summary = {
        "steps": 40, "loss": 0.5, "loss_target": 0.6, "held": True, "compression": 2.0,
        "fma_initial": 2000.0, "fma_final": 1000.0, "parameters_initial": 900,
        "parameters_final": 500, "accounting": "fma", "seed": 3,
        "metric": {"name": "accuracy", "value": 0.75}, "figures": {"perplexity": 2.5},
        "evaluated_on": "test",
    }  # fmt: skip
    config = {"task": task, "target": {"loss": 0.6}, "train": {"steps": 40}}
    environment = {"date": "2026-01-01T00:00:00+00:00", "commit": "0" * 40, "hardware": "CPU"}
    return Source(Path("runs/tiny"), model.eval(), config, environment, summary)
