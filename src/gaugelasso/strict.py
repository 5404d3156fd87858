"""Files from anywhere, read with suspicion: nothing endless, nothing said twice, no pickle."""

import json
import math
import stat
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from gaugelasso.errors import UserError, first_line

# Far more than a structure of any size takes: what is larger is no file of ours.
_LARGEST = 2**26
# What a spoiled archive makes its readers raise.
UNREADABLE = (
    OSError, EOFError, ValueError, TypeError, AttributeError, KeyError, RuntimeError, MemoryError,
    SyntaxError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def read_plain(path: Path) -> str:
    """The text of a plain file of a size that such files have; OSError or ValueError if not."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no plain file")
    if found.st_size > _LARGEST:
        raise ValueError(f"{found.st_size:,} bytes are too many")
    return path.read_text(encoding="utf-8")


def parse_json(text: str | bytes, finite: bool = True) -> Any:
    """What JSON says; ValueError if it is none, has a key twice, or a number that is not finite.

    Lists in lists in lists without an end are a RecursionError.
    """

    def number(text: str) -> float:
        if finite and not math.isfinite(float(text)):
            raise ValueError(f"{text[:20]} is not a finite number")
        return float(text)

    return json.loads(text, object_pairs_hook=_once, parse_float=number, parse_constant=number)


def _once(items: list[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(items)
    if len(held) < len(items):
        keys = [key for key, _ in items]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is there twice")
    return held


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name; UserError if it is none, or holds objects."""
    try:
        # Opened here: of a spoiled archive numpy leaves its file open.
        with path.open("rb") as file:
            # Of other files numpy would say how to load them unsafely.
            if not zipfile.is_zipfile(file):
                raise ValueError("it is no zip archive of arrays, or not a whole one")
            file.seek(0)
            with np.load(file, allow_pickle=False) as held:
                return {name: held[name] for name in held.files}
    except UNREADABLE as error:
        raise UserError(
            f"{str(path)!r} is not a readable .npz file ({first_line(error)})"
        ) from None
