"""The folder of a baseline: one command at a time, and the settings and structure it began with."""

import contextlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.files.lock import FolderLock
from gaugelasso.runs.reading import exists, read_json
from gaugelasso.runs.structures import MODEL_CLASS
from gaugelasso.runs.structures import STRUCTURE as NETWORK
from gaugelasso.runs.writing import make_folder, write_json, write_text

CONFIG, STRUCTURE = "config.toml", "structure.json"
BASELINE, SQUEEZED, RETRAINED = "baseline", "squeezed runs", "retrained runs"
# What a folder is of -> the file with its results. A sweep has the last one too.
RESULTS = {BASELINE: "baseline.json", SQUEEZED: "squeeze.json", RETRAINED: "results.json"}
# Settings that change no step, and so may differ. A run has its tokenizer in its own folder, which
# may have moved.
_FREE = {("train", "device"), ("train", "threads"), ("task", "tokenizer")}


def _network(content: Any) -> Any:
    """What a file with a structure says of the network, and not of where it comes from."""
    if not isinstance(content, dict):
        return content
    return content.get(MODEL_CLASS), content.get(NETWORK, content)


@contextlib.contextmanager
def opened(folder: Path, run: Path, config: str, structure: Any, what: str) -> Iterator[None]:
    """Hold the folder's lock, with the config (TOML) and the structure of the run in it.

    UserError, with nothing changed, if the folder holds those of another run or other settings.
    """
    make_folder(folder)
    lock = FolderLock(folder)
    try:
        _check_same(folder, run, tomllib.loads(config), structure, what)
        write_text(folder / CONFIG, config)
        write_json(folder / STRUCTURE, structure)
        yield
    finally:
        lock.release()


def _of_other_commands(folder: Path, what: str) -> Iterator[str]:
    """What a folder holds of a sweep, or of a command that keeps its results in another file."""
    begun = exists(folder / STRUCTURE) and exists(folder / CONFIG)
    yield from (
        name
        for kept, name in RESULTS.items()
        if exists(folder / name) and not (begun and kept == what)
    )
    if not begun:
        runs = sorted(folder.glob("*/config.json"))
        yield from (str(path.parent.relative_to(folder)) for path in runs)


def _check_same(
    folder: Path, run: Path, settings: dict[str, Any], structure: Any, what: str
) -> None:
    if exists(folder / "config.json"):
        raise UserError(f"{str(folder)!r} is a run folder; choose another --out")
    if found := next(_of_other_commands(folder, what), ""):
        raise UserError(f"{str(folder)!r} holds {found!r} of another command; choose another --out")
    path = folder / STRUCTURE
    if exists(path) and _network(read_json(path)) != _network(structure):
        raise UserError(
            f"{str(path)!r} is not the structure of {str(run)!r}: the folder holds the {what} of "
            "another run; choose another --out, or remove the folder"
        )
    path = folder / CONFIG
    if not exists(path):
        return
    try:
        before = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r}: not a readable config ({error})") from None
    for section, values in settings.items():
        for key, value in values.items():
            old = before.get(section, {}).get(key)
            if old != value and (section, key) not in _FREE:
                raise UserError(
                    f"{section}.{key} = {value!r}, but the {what} in {str(folder)!r} began with "
                    f"{old!r}; keep its setting, or choose another --out"
                )
