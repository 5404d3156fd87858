"""Files from anywhere, read with suspicion: nothing endless, nothing said twice, no pickle.

How much a file may make of itself is known before it is taken apart: text by its length and by
how many values it holds, an archive by what it declares.
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

# Far more than a structure of any size takes: what is larger is no file of ours.
LARGEST = 2**26
# A list of nothing is three letters, and twenty times as many bytes of memory. What a run writes
# may name thousands of sites in each of a hundred layers, but in few lists.
MOST_VALUES = 2**22
_MOST_LISTS = 2**17
# Of an archive, unpacked: this many times its size, or so many bytes if that is more. Encoded
# images hardly shrink; a few pictures of one colour do, a thousand times.
_GROWTH, _SMALL = 16, 2**26
# Bytes of an archive's list of what is in it: arrays of ours are a handful.
_DIRECTORY = 2**16
_LONGEST_END = 2**16 + 98  # of the records behind it, with a comment
_PACKERS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # numpy's
# What a spoiled archive makes its readers raise.
UNREADABLE = (
    OSError, EOFError, ValueError, TypeError, AttributeError, KeyError, RuntimeError, MemoryError,
    SyntaxError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def open_plain(path: Path, links: bool = True) -> io.BufferedReader:
    """A plain file, open; OSError where it is a pipe, which never ends, or the like.

    A link to one will do, if `links` are allowed.
    """
    # Or opening a pipe would wait for somebody to write into it.
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file")
    return open(descriptor, "rb")


def read_plain(path: Path, most: int = LARGEST) -> bytes:
    """A plain file of a size that such files have; OSError or ValueError if not."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{size:,} bytes are too many")
        return file.read()


def read_json(path: Path, finite: bool = True, most: int = LARGEST) -> Any:
    """What a plain file of JSON says, as `parse_light`; OSError where there is none."""
    return parse_light(read_plain(path, most), finite)


def parse_light(text: bytes, finite: bool = True, most: int = MOST_VALUES) -> Any:
    """`parse_json` of UTF-8 from anywhere; ValueError where it holds more than `most` values."""
    lists = text.count(b"[") + text.count(b"{")
    if lists > _MOST_LISTS or lists + text.count(b",") > most:
        raise ValueError(f"{len(text):,} bytes hold too many values")
    return parse_json(text.decode(), finite)


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
        [(twice, _)] = Counter(key for key, _ in items).most_common(1)
        raise ValueError(f"key {twice!r} is there twice")
    return held


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name; UserError if it is none, or holds objects."""
    try:
        # Opened here: of a spoiled archive numpy leaves its file open.
        with open_plain(path) as file:
            _check_archive(file)
            with np.load(file, allow_pickle=False) as held:
                arrays = {name: held[name] for name in held.files}
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise ValueError(f"{name!r} is no array")
        return arrays
    except UNREADABLE as error:
        raise UserError(
            f"{str(path)!r} is not a readable .npz file ({first_line(error)})"
        ) from None


def _check_archive(file: io.BufferedReader) -> None:
    """ValueError where this is no archive of arrays, or one that would grow out of proportion."""
    # Of other files numpy would say how to load them unsafely.
    if not zipfile.is_zipfile(file):
        raise ValueError("it is no zip archive of arrays, or not a whole one")
    if _directory_size(file) > _DIRECTORY:
        raise ValueError("it holds too many arrays")
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    # No more than is declared is ever unpacked.
    unpacked = sum(member.file_size for member in members)
    if unpacked > max(_SMALL, _GROWTH * size):
        raise ValueError(
            f"its {size:,} bytes would become {unpacked:,}; numpy.savez keeps arrays as they are"
        )
    if any(member.compress_type not in _PACKERS for member in members):
        raise ValueError("it is packed as numpy packs no arrays")
    file.seek(0)


def _directory_size(file: io.BufferedReader) -> int:
    """Bytes of a zip archive's directory, by the record at its end, or the longer one before."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _LONGEST_END))
    tail = file.read()
    at = tail.rfind(b"PK\5\6")
    size = int.from_bytes(tail[at + 12 : at + 16], "little")
    if tail[max(0, at - 20) : at].startswith(b"PK\6\7"):
        size = max(size, int.from_bytes(tail[at - 36 : at - 28], "little"))
    return size
