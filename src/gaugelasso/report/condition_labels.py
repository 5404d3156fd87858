"""What conditions are called side by side: their settings, or their folders."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gaugelasso.report.data import common_folder, settings
from gaugelasso.report.run import Run

# Conditions that differ in more settings than this are named by their folders.
_KEYS_SHOWN = 2
# If folders do not tell them apart, they are named by up to so many settings.
_KEYS_MOST = 6


def condition_labels(
    runs: Sequence[Run], conditions: Sequence[Mapping[str, Any]] | None = None
) -> list[str]:
    """Names of the conditions: what differs between them, or folders if that is much.

    `conditions` has that of each run, its settings by default.
    """
    given = [settings(run) for run in runs] if conditions is None else conditions
    varied = _varied(given)
    # What is not set is left out, unless nothing is set.
    named = [[key for key in varied if one.get(key) is not None] or varied for one in given]
    long = [
        ", ".join(f"{key} = {_short_value(one.get(key))}" for key in keys)
        for one, keys in zip(given, named, strict=True)
    ]
    if max(map(len, named)) <= _KEYS_SHOWN:
        return [label or "one condition" for label in long]
    groups: dict[str, list[Path]] = {}
    for run, label in zip(runs, long, strict=True):
        groups.setdefault(label, []).append(run.path)
    folders = {label: str(common_folder(paths)) for label, paths in groups.items()}
    # A folder that holds the runs of another condition too names neither.
    if not any(a != b and _holds(folders[a], folders[b]) for a in folders for b in folders):
        return [folders[label] for label in long]
    if max(map(len, named)) <= _KEYS_MOST:
        return long
    return [_with_others(groups[label]) for label in long]


def _holds(folder: str, other: str) -> bool:
    """Whether it is the other folder, or above it."""
    return Path(os.path.abspath(other)).is_relative_to(os.path.abspath(folder))


def _varied(given: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys with several values. Runs without a key, as of early versions, add none to it."""
    keys = dict.fromkeys(key for one in given for key in one)
    return [key for key in keys if len({repr(one[key]) for one in given if key in one}) > 1]


def _with_others(paths: Sequence[Path]) -> str:
    """The first of several folders, and how many there are beside it."""
    return f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else str(paths[0])


def _short_value(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
