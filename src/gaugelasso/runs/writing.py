"""Writes output files: each is complete or does not exist, and every problem is a UserError.

The message names the output that cannot be written. Used for run folders, reports and results.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.files import durable


def make_folder(path: Path) -> None:
    """Make a folder and its parents; an existing folder is left as it is."""
    check_name(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output {str(path)!r} cannot be made: {error.strerror}") from None


def check_name(path: Path) -> None:
    """UserError if the file system or safetensors cannot handle this name."""
    try:
        str(path).encode()
        path.exists()  # False for a null byte, which no name may hold
        if "\0" in str(path):
            raise UserError(f"output {str(path)!r} holds a null byte; choose another name")
    except UnicodeEncodeError:
        raise UserError(f"output {str(path)!r} is not UTF-8 text; choose another --out") from None
    except OSError as error:
        raise UserError(f"output {str(path)!r} cannot be made: {error.strerror}") from None


def check_writable(path: Path) -> None:
    """UserError if a file of this name could not be written; makes nothing.

    For what takes minutes before it writes.
    """
    check_name(path)
    with writing(path):
        if path.is_dir():
            raise _os_error(errno.EISDIR)
        folder = path.absolute().parent
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise _os_error(errno.ENOTDIR)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _os_error(errno.EACCES)


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file; after a crash it is complete or does not exist."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file; after a crash it is complete or does not exist."""
    # A file name in the text may hold bytes that are not UTF-8.
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file; after a crash it is complete or does not exist."""
    with writing(path):
        durable.replace_file(path, [data])


def move(old: Path, new: Path) -> None:
    """Rename a file or a folder; later writes can rely on the new name, even after a crash."""
    with writing(new):
        durable.rename(old, new)


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link; nothing happens if there is none."""
    with writing(path):
        durable.remove(path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"output {str(path)!r} cannot be written: {error.strerror}") from None
