"""The names of checkpoints in their folder, their order, and which of them are kept.

Looks at names only: whether a checkpoint is intact is for `checkpoint` to decide.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path

from gaugelasso.files.durable import remove
from gaugelasso.runs.folder import CHECKPOINTS
from gaugelasso.runs.manifest import NAME as MANIFEST
from gaugelasso.runs.reading import exists

# Suffix of an older checkpoint of the same step, until the new one has its name.
REPLACED = ".replaced"
# Suffix of a damaged checkpoint that is kept for inspection; with it, it is not a checkpoint.
DAMAGED = ".damaged"
_NAME = re.compile(rf"step-(\d{{8,18}})({re.escape(REPLACED)})?")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name; -1 if it is not the name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints of a run or of a folder, damaged ones included, the newest first.

    A folder that is a checkpoint itself is the only one.
    """
    if exists(folder / MANIFEST):
        return [folder]
    home = folder / CHECKPOINTS
    home = home if home.is_dir() else folder
    found = [path for path in home.iterdir() if step_of(path) >= 0] if home.is_dir() else []
    # Of two with the same step, the new one comes before the one that it replaces.
    return sorted(found, key=lambda path: (-step_of(path), path.name))


def remove_older(folder: Path, newest: int, keep: int, spare: Collection[int]) -> None:
    """Keep the newest `keep` checkpoints up to step `newest` and those of the steps in `spare`.

    Removes all others: older ones, later ones from before a rollback, and the remains of a crash.
    """
    found = [path for path in newest_first(folder) if step_of(path) <= newest]
    found = [path for path in found if not path.name.endswith(REPLACED)]
    kept = found[:keep] + [path for path in found if step_of(path) in spare]
    for path in folder.iterdir():
        if _NAME.fullmatch(path.name) and path not in kept:
            # Renamed first, so that a partly removed folder never has the name of a checkpoint.
            removed = path.with_name(path.name + ".tmp")
            remove(removed)
            os.replace(path, removed)
            remove(removed)
        elif _NAME.fullmatch(path.name.removesuffix(".tmp")) and path not in kept:
            remove(path)
