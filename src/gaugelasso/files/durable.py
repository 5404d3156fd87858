"""Files that outlive a crash: flushed to the disk, renamed only when they are whole.

Whatever a run or a checkpoint is made of is written here, so that what a full or broken
disk does to it is tried in one place. Raises OSError: what it means is the caller's to say.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

# Not to wait, should a pipe be in the place of a file.
_AT_ONCE = os.O_NONBLOCK
# A link may lead to a file that is no run's.
_OURS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | _AT_ONCE


def write_new(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a file and flush it to the disk; returns its SHA-256."""
    digest = hashlib.sha256()
    descriptor = os.open(path, _OURS | os.O_TRUNC, 0o666)
    try:
        for piece in pieces:
            digest.update(piece)
            _write(descriptor, piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def replace_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write aside, then rename: a reader never sees half a file, nor does the next boot."""
    aside = path.with_name(path.name + ".tmp")
    try:
        write_new(aside, pieces)
        rename(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def append(path: Path, data: bytes) -> None:
    """Add to the end of a file. Not flushed to the disk: that is for `sync` to do."""
    descriptor = os.open(path, _OURS | os.O_APPEND, 0o666)
    try:
        _write(descriptor, data)
    finally:
        os.close(descriptor)


def truncate(path: Path, size: int) -> None:
    """Let a file end after so many bytes, and tell the disk; made if it is not there."""
    descriptor = os.open(path, _OURS, 0o666)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename, and let the disk know before anything that relies on it."""
    os.replace(old, new)
    sync(new.parent)


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk; nothing if it is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _AT_ONCE)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """A file, a folder with all in it, or a link, but never what a link points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write(descriptor: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        # A disk that is nearly full may take a part of it.
        left = left[os.write(descriptor, left) :]
