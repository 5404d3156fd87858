"""Checks before a run resumes: settings, data, checkpoint state and logs must be its own."""

import dataclasses
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gaugelasso.compress.options import RunOptions
from gaugelasso.config import Config
from gaugelasso.errors import UserError
from gaugelasso.runs import logs
from gaugelasso.runs.folder import CHECKPOINTS, UNSAVED
from gaugelasso.runs.reading import read_json, read_rows
from gaugelasso.tasks import Task, WithData
from gaugelasso.tasks.stored import fingerprint

_log = logging.getLogger(__name__)
# Settings that change no step, and so may differ: the weights of model.from are compared by their
# fingerprint, and a tokenizer by that of the data.
FREE = {("train", key) for key in ("device", "threads", "graph", "fused", "checkpoint_keep")}
FREE |= {("train", "rank_timeout"), ("task", "cache"), ("task", "tokenizer"), ("model", "from")}
# Bound on every number in a state: a loss, a metric, a count of work.
_LARGEST = 1e300


# Keys of a checkpoint's state as version 0.1.0 wrote them, and as they are now.
_FORMER_KEYS = {
    "hoped_at": "pending_step",
    "hoped_fma": "pending_fma",
    "good_at": "fallback_step",
    "tried_at": "last_return_step",
    "in_vain": "failed_returns",
    "again_for": "second_anneal_steps",
    "off_for": "steps_off_target",
}


# What keys that a run of an earlier version lacks meant: `target.loss` was pressed towards, nothing
# was said of serving, no channels were exchanged, the penalty was part of the step, channels went
# by pressure, one by one, nothing was distilled, a teacher was in float32, and a head was not tied.
FORMER: dict[str, Any] = {
    "hold": "pressed",
    "distill": 0.0,
    "teacher": "",
    "teacher_precision": "float32",
    "tied_head": False,
} | {
    field.name: field.default
    for field in dataclasses.fields(RunOptions)
    if field.name in ("profile", "exchange", "coupling", "removal", "shape")
    or field.name.startswith("serving_")
}


def present_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's state under the present keys, whichever version wrote it."""
    present = {_FORMER_KEYS.get(key, key): value for key, value in state.items()}
    if "pressure" not in present and type(returns := present.get("returns")) is int:
        # Version 0.1.0 halved the pressure at every return and kept only their number.
        present |= {"pressure": 0.5 ** min(max(returns, 0), 1000), "steps_on_target": 0}
    return present


def check_same_config(config: Config, path: Path, measured: Collection[str] = ()) -> None:
    """UserError unless the config is the one in this file, which the run began with.

    The keys `measured` are not known yet, and not compared.
    """
    before = read_json(path)
    for section, values in config.to_dict().items():
        old = before.get(section) if isinstance(before, dict) else None
        if not isinstance(old, dict):
            raise UserError(f"{str(path)!r}: no config of a run, it has no [{section}]")
        for key, value in values.items():
            if (section, key) in FREE or key in measured or _same_module(key, old.get(key), value):
                continue
            if old.get(key, FORMER.get(key)) != value:
                raise UserError(
                    f"--resume: {section}.{key} = {value!r}, but the run began with "
                    f"{old.get(key)!r} ({str(path)!r}); keep its setting, or start another run"
                )


def _same_module(key: str, old: Any, new: Any) -> bool:
    """Whether both name the same thing in a file of the same name, which may have moved."""
    if key != "module" or not isinstance(old, str):
        return False
    return Path(old).name == Path(new).name


def warn_changed_code(config: Config, run: Path) -> None:
    """Log a warning if a file with code of the user is not as it was when the run began."""
    before = read_json(run / "environment.json")
    digests = before.get("code") if isinstance(before, dict) else None
    for section, digest in config.code().items():
        was = digests.get(section) if isinstance(digests, dict) else None
        if was not in (None, digest):
            _log.warning(
                "warning: the code of [%s] has changed since the run %r began (SHA-256 %.12s, "
                "was %.12s)", section, str(run), digest, str(was),
            )  # fmt: skip


def check_readable(run: Path) -> None:
    """UserError if a file that only reports read is damaged: better now than after training."""
    for name in ("environment.json", "initial.json"):
        read_json(run / name)


def data_of(task: Task) -> dict[str, Any]:
    """Name -> length and digest of the data a task reads from disk; empty if it reads none."""
    if not isinstance(task, WithData):
        return {}
    return {name: fingerprint(data) for name, data in task.stored_data().items()}


def check_same_data(data: Mapping[str, Any], path: Path) -> None:
    """UserError unless the data are those that this file describes, which the run began with."""
    if not data:
        return
    initial = read_json(path)
    # Written by a version whose task did not describe its data.
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


def check_same_profile(costs: Mapping[str, Any], path: Path) -> None:
    """UserError unless the times of `compress.profile` are those that the run began with."""
    initial = read_json(path)
    before = initial.get("costs") if isinstance(initial, dict) else None
    was = before.get("profile") if isinstance(before, dict) else None
    if was is not None and was != costs.get("profile"):
        raise UserError(
            f"--resume: the table of compress.profile is not the one that the run began with "
            f"(SHA-256 {str(costs.get('profile'))[:12]}, was {str(was)[:12]}, {str(path)!r}); put "
            "that back, or start another run"
        )


def _data_message(data: Any) -> str:
    try:
        return f"{data['bytes']:,} bytes of SHA-256 {data['sha256'][:12]}"
    except (TypeError, KeyError, ValueError):
        return "nothing"


def check_little_lost(run: Path, first: int) -> None:
    """UserError if a run without checkpoints has rows beyond step `first`, or a summary.

    Its checkpoints are lost, and starting over would overwrite its logs. A run that never had a
    checkpoint (its steps failed when the first was due) does start over.
    """
    if (run / UNSAVED).exists():
        return
    rows = (row["step"] for name in logs.NAMES for row in read_rows(run / name))
    summary = (run / "summary.json").exists()
    reached = max(rows, default=0)
    if summary or reached > first:
        found = "a summary" if summary else f"rows up to step {reached}"
        raise UserError(
            f"--resume: {str(run)!r} has {found}, but no checkpoint to go on from in "
            f"{str(run / CHECKPOINTS)!r}; put it back, or start anew with --overwrite"
        )


def check_state(state: Mapping[str, Any], fresh: Mapping[str, Any], steps: int, path: Path) -> None:
    """UserError unless the state has the keys of `fresh`, with values of the same kinds."""
    if state.keys() != fresh.keys():
        odd = sorted(state.keys() ^ fresh.keys())
        raise UserError(f"{str(path)!r}: not a run's state, {odd[0]!r} is missing or unknown")
    for key, value in state.items():
        if key == "course":
            continue  # checked where it is loaded
        past = not key.endswith(("_at", "_step")) or value is None or _is_past(value, steps)
        fits = past and _fits(value, fresh[key], steps)
        if not fits or (key == "pressure" and not 0 <= value <= 1):
            raise UserError(f"{str(path)!r}: not a run's state, {key} = {str(value)[:60]}")


def _is_past(value: Any, steps: int) -> bool:
    return type(value) is int and 0 <= value <= steps


def _fits(value: Any, fresh: Any, steps: int) -> bool:
    """A list holds numbers, a table numbers by step; None is allowed where `fresh` has None."""
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
