"""Strict readers for files of unknown origin: no pipes, no duplicate keys, no pickle.

The memory that a file needs is bounded before it is parsed: for text by its length and its number
of values, for an archive by the sizes that it declares.
"""

import errno
import io
import json
import math
import os
import stat
import struct
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from gaugelasso.errors import UserError, first_line

# Bytes of a JSON file; far more than the structure of any model needs.
LARGEST = 2**26
# An empty list takes three bytes of text and many times that in memory. The files of a run may
# hold thousands of sites in each of a hundred layers, but in few lists.
MOST_VALUES = 2**22
_MOST_LISTS = 2**17
# An archive may unpack to `_GROWTH` times its size, or to `_SMALL` bytes if that is more. Encoded
# images hardly compress, but a few images of one colour compress very much.
_GROWTH, _SMALL = 16, 2**26
# Bytes of an archive's directory; a valid file has only a few arrays.
_DIRECTORY = 2**16
_LONGEST_END = 2**16 + 98  # bytes of the records after the directory, with a comment
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those that numpy writes
# What readers raise for a damaged archive.
UNREADABLE = (
    OSError, EOFError, ValueError, TypeError, AttributeError, KeyError, RuntimeError, MemoryError,
    SyntaxError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def open_plain(path: Path, links: bool = True) -> io.BufferedReader:
    """Open a regular file; OSError if it is a pipe, a device or a folder.

    Without `links`, a symbolic link is an OSError too.
    """
    # Non-blocking: opening a pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return open(descriptor, "rb")


def read_plain(path: Path, most: int = LARGEST) -> bytes:
    """Read a regular file; OSError if it is none, ValueError if it has more than `most` bytes."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{size:,} bytes are too many, the limit is {most:,}")
        return file.read()


def read_json(path: Path, finite: bool = True, most: int = LARGEST) -> Any:
    """Read a JSON file with `parse_light`; OSError if it cannot be opened."""
    return parse_light(read_plain(path, most), finite)


def parse_light(text: bytes, finite: bool = True, most: int = MOST_VALUES) -> Any:
    """Parse UTF-8 JSON as `parse_json` does; ValueError if it holds more than `most` values."""
    lists = text.count(b"[") + text.count(b"{")
    if lists > _MOST_LISTS or lists + text.count(b",") > most:
        raise ValueError(f"{len(text):,} bytes hold too many values")
    return parse_json(text.decode(), finite)


def parse_json(text: str | bytes, finite: bool = True) -> Any:
    """Parse JSON; ValueError if it is invalid or has a key twice.

    With `finite`, NaN and infinity are a ValueError too. Lists nested too deeply are a
    RecursionError.
    """

    def number(text: str) -> float:
        if finite and not math.isfinite(float(text)):
            raise ValueError(f"{text[:20]} is not a finite number")
        return float(text)

    return json.loads(text, object_pairs_hook=_unique, parse_float=number, parse_constant=number)


def _unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(items)
    if len(table) < len(items):
        [(key, _)] = Counter(key for key, _ in items).most_common(1)
        raise ValueError(f"key {key!r} appears twice")
    return table


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name; UserError if it is damaged or holds objects."""
    try:
        # Opened here, because numpy does not close a damaged archive.
        with open_plain(path) as file:
            _check_archive(file)
            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise ValueError(f"{name!r} is not an array")
        return arrays
    except UNREADABLE as error:
        raise UserError(
            f"{str(path)!r} is not a readable .npz file ({first_line(error)})"
        ) from None


def _check_archive(file: io.BufferedReader) -> None:
    """ValueError if this is not an archive of arrays, or would unpack to far more than its size."""
    # For other files, numpy's message would recommend to load them with pickle.
    if not zipfile.is_zipfile(file):
        raise ValueError("it is not a complete zip archive of arrays")
    if _directory_size(file) > _DIRECTORY:
        raise ValueError("it holds too many arrays")
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    # The readers never unpack more than the declared size.
    unpacked = sum(member.file_size for member in members)
    if unpacked > max(_SMALL, _GROWTH * size):
        raise ValueError(
            f"its {size:,} bytes would unpack to {unpacked:,}; write it with numpy.savez, which "
            "does not compress"
        )
    if any(member.compress_type not in _COMPRESSIONS for member in members):
        raise ValueError("its compression is not one that numpy uses")
    file.seek(0)


def _directory_size(file: io.BufferedReader) -> int:
    """Return the bytes of a zip archive's directory, from its end record or the zip64 record."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _LONGEST_END))
    tail = file.read()
    at = tail.rfind(b"PK\5\6")
    size = int.from_bytes(tail[at + 12 : at + 16], "little")
    if tail[max(0, at - 20) : at].startswith(b"PK\6\7"):
        size = max(size, int.from_bytes(tail[at - 36 : at - 28], "little"))
    return size
