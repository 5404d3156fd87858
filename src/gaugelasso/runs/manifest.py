"""The manifest of a checkpoint: the length and SHA-256 of every file of the checkpoint.

It is written last, so a folder without a manifest is not a checkpoint. It must name exactly the
files of a checkpoint. They are verified against it before any of their content is used. Files are
hashed block by block, so a large file needs little memory.
"""

import hashlib
import io
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.files.durable import write_new
from gaugelasso.files.untrusted import open_plain
from gaugelasso.runs.reading import read_json

NAME = "manifest.json"
_LAYOUT = 1  # version of the checkpoint's layout; another layout takes another number
_LARGEST = 2**14  # bytes; a manifest has a few lines for each of a few files


def write_manifest(folder: Path, step: int, digests: Mapping[str, str]) -> None:
    """Write the manifest of the files that have these SHA-256 digests."""
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
        for name, digest in digests.items()
    }
    data = {"layout": _LAYOUT, "step": step, "files": files}
    write_new(folder / NAME, [_text(data).encode()])


def check_manifest(folder: Path, names: Collection[str]) -> int:
    """Return the step of an intact checkpoint; UserError names the file that is damaged."""
    path = folder / NAME
    _open(path).close()
    data = read_json(path, most=_LARGEST)
    if not _is_manifest(data):
        raise UserError(f"{str(path)!r}: damaged, it is not a manifest of layout {_LAYOUT}")
    if data["files"].keys() != set(names):
        odd = sorted(data["files"].keys() ^ set(names))
        raise UserError(f"{str(path)!r}: damaged, it must name {', '.join(names)}, not {odd[:3]}")
    # A manifest has one valid text, so any changed byte is detected.
    if path.read_bytes() != _text(data).encode():
        raise UserError(f"{str(path)!r}: damaged, it was changed after it was written")
    for name in names:
        _check_file(folder / name, data["files"][name])
    return data["step"]


def _text(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1) + "\n"


def _is_manifest(data: Any) -> bool:
    if not isinstance(data, dict) or data.keys() != {"layout", "step", "files"}:
        return False
    if data["layout"] != _LAYOUT or type(data["step"]) is not int or data["step"] < 0:
        return False
    return isinstance(data["files"], dict) and all(
        isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"}
        for entry in data["files"].values()
    )


def _check_file(path: Path, entry: dict[str, Any]) -> None:
    try:
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != (wanted := entry["bytes"]):
                shown = f"{wanted:,}" if type(wanted) is int else repr(wanted)
                raise UserError(
                    f"{str(path)!r}: damaged, {size:,} bytes where the manifest has {shown}"
                )
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                raise UserError(f"{str(path)!r}: damaged, its SHA-256 is not the manifest's")
    except OSError as error:
        raise UserError(f"{str(path)!r}: cannot be read ({error.strerror})") from None


def _open(path: Path) -> io.BufferedReader:
    """Open a regular file. A link is refused: it may point anywhere. So is a pipe: it may block."""
    try:
        return open_plain(path, links=False)
    except FileNotFoundError:
        raise UserError(f"{str(path)!r}: no such file") from None
    except OSError as error:
        raise UserError(f"{str(path)!r}: damaged, it cannot be read ({error.strerror})") from None
