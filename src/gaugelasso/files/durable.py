"""Files that survive a crash: written under another name, flushed to the disk, then renamed.

All files of runs and checkpoints are written here, so that tests can simulate a full or failing
disk in one place. Raises OSError; callers turn it into a message.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

# If a pipe is in the place of the file, opening it must not block.
_NONBLOCK = os.O_NONBLOCK
# A link may point to a file that does not belong to a run.
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | _NONBLOCK


def write_new(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a file and flush it to the disk; return its SHA-256."""
    digest = hashlib.sha256()
    descriptor = os.open(path, _WRITE | os.O_TRUNC, 0o666)
    try:
        for piece in pieces:
            digest.update(piece)
            _write(descriptor, piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def replace_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write under another name, then rename: the file is never incomplete, even after a crash."""
    aside = path.with_name(path.name + ".tmp")
    try:
        write_new(aside, pieces)
        rename(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def append(path: Path, data: bytes) -> None:
    """Add to the end of a file, without flushing it to the disk: see `sync`."""
    descriptor = os.open(path, _WRITE | os.O_APPEND, 0o666)
    try:
        _write(descriptor, data)
    finally:
        os.close(descriptor)


def truncate(path: Path, size: int) -> None:
    """Cut a file to this many bytes and flush it to the disk; create it if it is missing."""
    descriptor = os.open(path, _WRITE, 0o666)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename, and flush the folder to the disk so that later writes can rely on the new name."""
    os.replace(old, new)
    sync(new.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk; do nothing if it does not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _NONBLOCK)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link, but never what a link points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write(descriptor: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        # A disk that is nearly full may accept only a part.
        left = left[os.write(descriptor, left) :]
