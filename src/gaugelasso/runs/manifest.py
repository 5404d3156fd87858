"""The manifest of a checkpoint: the files it is made of, to the last bit.

Written last: a folder without one never was a checkpoint. It names the files that a
checkpoint has, no more and no fewer, each with its length and SHA-256, so what it says is
read before anything in those files is believed. Files are hashed as they are read, a block
at a time.
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
from gaugelasso.runs.folder import read_json

NAME = "manifest.json"
_LAYOUT = 1  # of a checkpoint; another layout takes another number
_LARGEST = 2**14  # bytes: a line or three for each of a handful of files


def write_manifest(folder: Path, step: int, digests: Mapping[str, str]) -> None:
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
        for name, digest in digests.items()
    }
    data = {"layout": _LAYOUT, "step": step, "files": files}
    write_new(folder / NAME, [_text(data).encode()])


def check_manifest(folder: Path, names: Collection[str]) -> int:
    """The step of a checkpoint that is whole; UserError names the file that is not."""
    path = folder / NAME
    _open(path).close()
    data = read_json(path, most=_LARGEST)
    if not _is_manifest(data):
        raise UserError(f"{str(path)!r}: damaged, it is no manifest of layout {_LAYOUT}")
    if data["files"].keys() != set(names):
        odd = sorted(data["files"].keys() ^ set(names))
        raise UserError(f"{str(path)!r}: damaged, it must name {', '.join(names)}, not {odd[:3]}")
    # There is one way to write a manifest: whoever changed a byte shows.
    if path.read_bytes() != _text(data).encode():
        raise UserError(f"{str(path)!r}: damaged, it is not as it was written")
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


def _check_file(path: Path, said: dict[str, Any]) -> None:
    try:
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != said["bytes"]:
                raise UserError(
                    f"{str(path)!r}: damaged, {size:,} bytes where the manifest has "
                    f"{said['bytes']!r}"
                )
            if hashlib.file_digest(file, "sha256").hexdigest() != said["sha256"]:
                raise UserError(f"{str(path)!r}: damaged, its SHA-256 is not the manifest's")
    except OSError as error:
        raise UserError(f"{str(path)!r}: cannot be read ({error.strerror})") from None


def _open(path: Path) -> io.BufferedReader:
    """A plain file; a link, which may point anywhere, or a pipe, which never ends, is refused."""
    try:
        return open_plain(path, links=False)
    except FileNotFoundError:
        raise UserError(f"{str(path)!r}: no such file") from None
    except OSError as error:
        raise UserError(f"{str(path)!r}: damaged, it cannot be read ({error.strerror})") from None
