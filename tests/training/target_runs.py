"""Runs that name another target than a loss alone: their settings, their start, spoiled ends."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from gaugelasso.config import run_config
from gaugelasso.config.target import TargetConfig
from gaugelasso.runs.folder import Existing
from gaugelasso.training.trainer import Trainer
from tests.tiny import tiny
from tests.tiny_runs import newest, read, rows

QUICK: dict[str, Any] = {"compress__interval": 2, "compress__trust": 6.0, "train__steps": 40}
LONGER = {**QUICK, "train__steps": 60}  # a work target is met later than a metric
# For runs that reach no target, however long they are.
BRIEF = {**QUICK, "train__steps": 20, "train__cooldown": 5, "train__warmup": 2}
KILLED = 26  # behind a checkpoint


def start(
    folder: Path,
    target: TargetConfig,
    name: str = "run",
    existing: Existing = "refuse",
    changes: dict[str, Any] | None = None,
) -> Trainer:
    changes = changes or (LONGER if target.fma else QUICK)
    return Trainer(replace(tiny(folder, **changes), target=target), folder / name, existing)


def course_of(folder: Path) -> dict[str, Any]:
    return read(newest(folder) / "state.json")["course"]


def assert_a_spoiled_end_gives_way(run: Path, folder: Path) -> None:
    """The weights are spoiled in the last step: the run ends on an earlier state that held."""
    shutil.copytree(run.with_name(str(KILLED)), folder / "run")
    trainer = start(folder, run_config(run).target, existing="resume")
    take = trainer._step

    def one() -> Any:
        event = take()
        if trainer.compressor.steps == 40:
            trainer.compressor.optimizer.store.weight.mul_(30)
        return event

    trainer._step = one  # type: ignore[method-assign]
    summary = trainer.run()
    assert summary["held"] is True
    assert summary["held_step"] == course_of(folder / "run")["held_at"] < 40
    assert rows(folder / "run", "events.jsonl")[-1]["returned_to"] == summary["held_step"]
