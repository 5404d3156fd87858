"""Loads run folders and checks which of them may be reported together.

Reads files only: draws nothing, formats nothing. A run in progress is read up to its newest row.
"""

import logging
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.report.run import Run
from gaugelasso.report.schema import checked, checked_rows
from gaugelasso.runs.folder import CONFIG_SECTIONS, REFERENCE
from gaugelasso.runs.reading import (
    LAST_BATCHES,
    LOSS_ON_BATCHES,
    SERVING,
    exists,
    is_folder,
    read_json,
    read_rows,
)
from gaugelasso.runs.rotation import newest_first, step_of

_logger = logging.getLogger(__name__)

_REQUIRED_FILES = ("config.json", "environment.json", "initial.json")
# The keys of [train] that change the result of a run; the others set logging and hardware.
_COMPARED_TRAIN_KEYS = (
    "steps", "warmup", "cooldown", "saturation", "lr_min", "batch", "accumulate",
)  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """One arm of a comparison: its finished runs, sorted by seed.

    `seeds_requested` counts the seeds of the sweep, finished or not.
    """

    name: str
    changes: tuple[str, ...]
    runs: list[Run]
    seeds_requested: int


def load_run(folder: Path) -> Run:
    """Read a run folder. UserError, naming folder and file, if it is not one."""
    if not is_folder(folder):
        why = "it is a file" if folder.is_file() else "no such folder"
        raise UserError(f"{str(folder)!r} is not a run folder: {why}")
    for name in _REQUIRED_FILES:
        if not (folder / name).is_file():
            raise UserError(
                f"{str(folder)!r} is not a run folder: {name} is missing{_hint(folder)}"
            )
    config, environment, initial = (_read(folder / name) for name in _REQUIRED_FILES)
    summary = folder / "summary.json"
    run = Run(
        path=folder,
        config=config,
        environment=environment,
        initial=initial,
        metrics=_read_log(folder / "metrics.jsonl"),
        events=_read_log(folder / "events.jsonl"),
        resumed=_read_log(folder / "resumed.jsonl"),
        summary=_read(summary, finite=False) if summary.exists() else None,
        original=_original(folder) if "from" in config["model"] else None,
        serving=_serving(folder / SERVING) if summary.exists() else (),
        checkpoint_step=0 if summary.exists() else _newest_checkpoint(folder),
    )
    run = _named_by_place(run)
    for gap in _log_gaps(run):
        _logger.warning("warning: %s", gap)
    return run


def _named_by_place(run: Run) -> Run:
    """Early versions called the loss of a loop without `evaluate` held-out, too."""
    summary, old = run.summary or {}, "held-out loss"
    if summary.get("evaluated_on") != LAST_BATCHES or summary["metric"]["name"] != old:
        return run
    metrics = tuple(
        {LOSS_ON_BATCHES if key == old else key: value for key, value in row.items()}
        for row in run.metrics
    )
    metric = summary["metric"] | {"name": LOSS_ON_BATCHES}
    return replace(run, metrics=metrics, summary=summary | {"metric": metric})


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Expand each path to run folders: a run, the folder of a sweep, or a folder of such."""
    found = [run for path in paths for run in (_runs_under(path) or [path])]
    return list(dict.fromkeys(found))


def common_folder(folders: Sequence[Path]) -> Path:
    """The default place for output: the only folder, or the common parent of several.

    As the folders are given, relative to the current directory where all of them lie below it.
    """
    if len(folders) == 1:
        return folders[0]
    parents = [Path(os.path.abspath(folder)).parent for folder in folders]
    found, here = Path(os.path.commonpath(parents)), Path.cwd()
    relative = found.is_relative_to(here) and not any(folder.is_absolute() for folder in folders)
    return found.relative_to(here) if relative else found


def load_condition(folders: Sequence[Path]) -> list[Run]:
    """Read the runs of one condition, sorted by seed; UserError unless only the seeds differ."""
    if not folders:
        raise UserError("no run folder given")
    runs = sorted(map(load_run, folders), key=seed_order)
    for before, run in pairwise(runs):
        check_same(before, run, "are not runs of one condition")
        pair = f"{str(before.path)!r} and {str(run.path)!r}"
        # Unknown before a run is finished, and of early versions.
        ours, theirs = ((each.summary or {}).get("method") for each in (before, run))
        if ours and theirs and ours != theirs:
            raise UserError(
                f"{pair} are not runs of one condition: the method is {ours!r} in one and "
                f"{theirs!r} in the other"
            )
        check_other_seed(before, run, "both have")
    return runs


def seed_order(run: Run) -> tuple[int, str]:
    """The order of the runs of a condition: by seed, and own loops by folder."""
    return run.seed, os.path.realpath(run.path)


def check_other_seed(before: Run, run: Run, problem: str) -> None:
    """UserError, containing `problem`, if neighbours in `seed_order` have the same seed.

    Seeds of own loops are not known: they are different runs in different folders.
    """
    differ = seed_order(before) != seed_order(run) if run.is_own_loop else before.seed != run.seed
    if not differ:
        same = "the same folder" if run.is_own_loop else f"seed {run.seed}"
        raise UserError(
            f"{str(before.path)!r} and {str(run.path)!r} {problem} {same}; give only one of them"
        )


def note_on_own_loops(runs: Sequence[Run]) -> str:
    """A sentence on what is not known of own loops; empty for other runs."""
    if not runs[0].is_own_loop:
        return ""
    return (
        " Own loops name no seed and no data: each folder counts as a seed, and you must know "
        "whether their data are the same."
    )


def check_finished(runs: Sequence[Run]) -> None:
    """UserError if a run is not finished."""
    for run in runs:
        if run.summary is None:
            raise UserError(f"{str(run.path)!r} is not finished: summary.json is missing")


def check_same(before: Run, run: Run, problem: str, only: Collection[str] | None = None) -> None:
    """UserError, containing `problem`, if two runs differ in a setting, or in one of `only`."""
    ours, theirs = settings(before), settings(run)
    # A task of one's own has no name, and a built-in one no module.
    compared = only is None or not {"task.name", "task.module"}.isdisjoint(only)
    if compared and ("task.module" in ours) != ("task.module" in theirs):
        tasks = [each.get("task.module", each.get("task.name")) for each in (ours, theirs)]
        raise UserError(
            f"{str(before.path)!r} and {str(run.path)!r} {problem}: the task is {tasks[0]!r} in "
            f"one and {tasks[1]!r} in the other"
        )
    # Different tasks differ in many settings: report the task's name first.
    named = ("task.name", "task.module", "model.module")
    for key in sorted(ours.keys() & theirs.keys(), key=lambda key: (key not in named, key)):
        if ours[key] != theirs[key] and (only is None or key in only):
            raise UserError(
                f"{str(before.path)!r} and {str(run.path)!r} {problem}: {key} is "
                f"{ours[key]!r} in one and {theirs[key]!r} in the other"
            )


def settings(run: Run) -> dict[str, Any]:
    """Every setting that changes the result of a run, except its seed."""
    sections = {key: dict(run.config[key]) for key in CONFIG_SECTIONS}
    for section in (sections["task"], sections["model"]):
        if "module" in section:  # the same code may be in another folder
            section["module"] = Path(str(section["module"])).name
    sections["target"].pop("reference_loss", None)  # measured, with the seed of the run
    train = sections["train"]
    sections["train"] = {key: train[key] for key in _COMPARED_TRAIN_KEYS if key in train}
    if run.is_own_loop:  # its config does not describe the model
        named = Path(run.own_model).name or "transformer"
        sections["model"] = {"class": named, "fma": run.initial["fma"]}
        # It has the figures that are named alone, where that of a task has null for the others.
        sections["target"] = dict.fromkeys(("loss", "metric")) | sections["target"]
        if on := (run.summary or run.initial).get("evaluated_on"):
            sections["task"]["evaluated_on"] = on
    return {f"{name}.{key}": v for name, values in sections.items() for key, v in values.items()}


def _read(path: Path, finite: bool = True) -> dict[str, Any]:
    return checked(path, read_json(path, finite))


def _read_log(path: Path) -> tuple[dict[str, Any], ...]:
    return tuple(checked_rows(path, read_rows(path)))


def _original(folder: Path) -> dict[str, Any] | None:
    """The figures of the original, in the run folder or above it, where `compress` writes them."""
    found = (each / "original.json" for each in (folder, folder.absolute().parent))
    return next((_read(path) for path in found if path.is_file()), None)


def _serving(path: Path) -> tuple[dict[str, Any], ...]:
    return tuple(_read(path)["inference"]) if path.exists() else ()


def _newest_checkpoint(folder: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max(map(step_of, newest_first(folder)), default=0)


def _log_gaps(run: Run) -> Iterator[str]:
    """Where the logs of a finished run end before the run does."""
    if run.summary is None:
        return
    last, steps = run.metrics[-1]["step"] if run.metrics else 0, run.summary["steps"]
    if last < steps:
        yield (
            f"{str(run.path / 'metrics.jsonl')!r} is incomplete: it ends at step {last:,}, and the "
            f"run has {steps:,} (summary.json); curves and step times are of its rows alone"
        )
    if not math.isclose(run.fma_trajectory()[1][-1], run.summary["fma_final"]):
        yield (
            f"{str(run.path / 'events.jsonl')!r} is incomplete: it does not lead to the final "
            "model of summary.json; widths, and pictures of them, are of its rows alone"
        )


def _hint(folder: Path) -> str:
    """What is inside a folder that is not a run folder itself, for its error message."""
    if is_folder(folder / REFERENCE):
        return f"; the run has not begun, its reference is in {str(folder / REFERENCE)!r}"
    inside = [str(run.relative_to(folder)) for run in _runs_under(folder)]
    return f"; it contains run folders: {', '.join(inside[:5])}" if inside else ""


def _runs_under(folder: Path) -> list[Path]:
    """Run folders one or two levels below a folder that is not a run folder itself.

    Without those inside a run folder: the reference of a run is a part of it.
    """
    if exists(folder / "initial.json"):
        return []
    levels = ("*/initial.json", "*/*/initial.json")
    found = sorted(file.parent for level in levels for file in folder.glob(level))
    return [run for run in found if not exists(run.parent / "config.json")]
