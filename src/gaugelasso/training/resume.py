"""What a run that goes on must find as it left it: its settings, its data, its state, its rows."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gaugelasso.config import Config
from gaugelasso.errors import UserError
from gaugelasso.runs import logs
from gaugelasso.runs.folder import CHECKPOINTS, UNSAVED
from gaugelasso.runs.reading import read_json, read_rows
from gaugelasso.tasks import Task, WithData
from gaugelasso.tasks.stored import known

# What changes no step, and so may differ.
_FREE = {("train", key) for key in ("device", "threads", "graph", "fused", "checkpoint_keep")}
_FREE |= {("train", "rank_timeout"), ("task", "cache")}
# A loss, a metric, a count of work: none is beyond a float.
_LARGEST = 1e300


def check_same_config(config: Config, path: Path) -> None:
    """A run goes on with the settings it began with, which are in this file."""
    before = read_json(path)
    for section, values in config.to_dict().items():
        old = before.get(section) if isinstance(before, dict) else None
        if not isinstance(old, dict):
            raise UserError(f"{str(path)!r}: no config of a run, it has no [{section}]")
        for key, value in values.items():
            if (section, key) not in _FREE and old.get(key) != value:
                raise UserError(
                    f"--resume: {section}.{key} = {value!r}, but the run began with "
                    f"{old.get(key)!r} ({str(path)!r}); keep its setting, or start another run"
                )


def check_readable(run: Path) -> None:
    """What only reports will ask for: not after all training are they to find it damaged."""
    for name in ("environment.json", "initial.json"):
        read_json(run / name)


def data_of(task: Task) -> dict[str, Any]:
    """What the data of a task are known by, by their names; nothing where none are stored."""
    if not isinstance(task, WithData):
        return {}
    return {name: known(data) for name, data in task.stored_data().items()}


def check_same_data(data: Mapping[str, Any], path: Path) -> None:
    """A run goes on with the data it began with, as this file knows them."""
    if not data:
        return
    initial = read_json(path)
    # A task may have learned to tell since the run began.
    before = initial.get("data") if isinstance(initial, dict) else None
    if not isinstance(before, dict):
        return
    for name, here in data.items():
        if before.get(name) != here:
            raise UserError(
                f"--resume: the {name}, {_data_message(here)}, is not what the run began with, "
                f"{_data_message(before.get(name))} ({str(path)!r}); "
                "put that back, or start another run"
            )


def _data_message(data: Any) -> str:
    try:
        return f"{data['bytes']:,} bytes of SHA-256 {data['sha256'][:12]}"
    except (TypeError, KeyError, ValueError):
        return "nothing"


def check_little_lost(run: Path, first: int) -> None:
    """UserError if a run that lost its checkpoints had come beyond step `first`, or to its end.

    It would start over, and what it has written be lost. One that never had a checkpoint, as
    its steps failed when the first was due, has nothing else to do.
    """
    if (run / UNSAVED).exists():
        return
    rows = (row["step"] for name in logs.NAMES for row in read_rows(run / name))
    summary = (run / "summary.json").exists()
    reached = max(rows, default=0)
    if summary or reached > first:
        told = "a summary" if summary else f"rows up to step {reached}"
        raise UserError(
            f"--resume: {str(run)!r} has {told}, but no checkpoint to go on from in "
            f"{str(run / CHECKPOINTS)!r}; put it back, or start anew with --overwrite"
        )


def check_state(state: Mapping[str, Any], fresh: Mapping[str, Any], steps: int, path: Path) -> None:
    """UserError unless the values are those of `fresh`, each of its kind, after so many steps."""
    if state.keys() != fresh.keys():
        odd = sorted(state.keys() ^ fresh.keys())
        raise UserError(f"{str(path)!r}: not a run's state, {odd[0]!r} is missing or unknown")
    for key, value in state.items():
        past = not key.endswith(("_at", "_step")) or value is None or _is_past(value, steps)
        if not (past and _fits(value, fresh[key], steps)):
            raise UserError(f"{str(path)!r}: not a run's state, {key} = {str(value)[:60]}")


def _is_past(value: Any, steps: int) -> bool:
    return type(value) is int and 0 <= value <= steps


def _fits(value: Any, fresh: Any, steps: int) -> bool:
    """Lists stay lists of numbers, tables such by step; what was not known yet may still be so."""
    if isinstance(fresh, list):
        return isinstance(value, list) and all(_fits(each, 0.0, steps) for each in value)
    if isinstance(fresh, dict):
        return isinstance(value, dict) and all(
            re.fullmatch("[0-9]{1,15}", key)
            and _is_past(int(key), steps)
            and _fits(each, 0.0, steps)
            for key, each in value.items()
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value is None and fresh is None
    return abs(value) <= _LARGEST
