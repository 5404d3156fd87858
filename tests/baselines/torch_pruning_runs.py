"""Small runs of Torch-Pruning."""

from collections.abc import Mapping
from pathlib import Path

from gaugelasso.baselines.source import Source
from gaugelasso.baselines.torch_pruning_choice import (
    Mode,
    PrunerOptions,
)
from gaugelasso.baselines.torch_pruning_run import (
    TorchPruningPlan,
    TorchPruningTrainer,
    torch_pruning_settings,
)
from gaugelasso.runs.folder import Existing
from tests.tiny_runs import read


def plan_of(run: Path, mode: Mode = "magnitude", reg: float = 1e-2) -> TorchPruningPlan:
    return TorchPruningPlan(
        loss=None, fma=0.4 * read(run / "summary.json")["fma_final"], rounds=2, channels=1,
        corrective=4, finetune=12, sparse=0 if mode == "magnitude" else 14,
        options=PrunerOptions(mode, "global", reg),
    )  # fmt: skip


def start(
    run: Path,
    plan: TorchPruningPlan,
    name: str,
    existing: Existing = "refuse",
    changes: Mapping[str, str] | None = None,
) -> TorchPruningTrainer:
    source = Source.of(run)
    config = torch_pruning_settings(source, plan, changes or {})
    return TorchPruningTrainer(source, plan, config, run.parent / name, existing)
