"""Small runs of CoFi."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from gaugelasso.baselines.cofi import CofiPlan
from gaugelasso.baselines.cofi_run import CofiTrainer, cofi_settings
from gaugelasso.baselines.source import Source
from gaugelasso.compress.result import TargetMissed
from gaugelasso.runs.folder import Existing
from tests.tiny_runs import keep_images


def plan_of(target: float, rate: float = 0.1) -> CofiPlan:
    return CofiPlan("fma", target, warmup=5, prune=80, finetune=10, distill=0.5, mask_rate=rate)


def start(
    run: Path,
    plan: CofiPlan,
    name: str,
    existing: Existing = "refuse",
    changes: Mapping[str, str] | None = None,
) -> CofiTrainer:
    source = Source.of(run)
    config = cofi_settings(source, plan, changes or {})
    return CofiTrainer(source, plan, config, run.parent / name, existing)


def finish(
    run: Path,
    plan: CofiPlan,
    name: str,
    existing: Existing = "refuse",
    kept: tuple[int, ...] = (),
    changes: Mapping[str, str] | None = None,
) -> None:
    trainer = start(run, plan, name, existing, changes)
    if kept:
        keep_images(trainer, *kept)
    with contextlib.suppress(TargetMissed):
        trainer.run()
