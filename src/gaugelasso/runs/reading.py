"""Reads the JSON files and the logs of a run.

Every problem with a file is a UserError that names the file. Files may come from anywhere, so
they are read with the limits of `files.untrusted`.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError, first_line
from gaugelasso.files import untrusted

# Limits of one row in bytes and in values. An event has a few values for each of thousands of axes.
_LONGEST_ROW, _MOST_VALUES = 2**24, 2**18
# `last_row` reads only this many bytes at the end of a log. Rows of metrics are much shorter.
_TAIL = 2**16


# What `bench RUN --inference` measured of the final model.
SERVING = "serving.json"
# The task in the config.json of a folder that `gaugelasso import` wrote, and of a recorded loop.
IMPORTED, OWN_LOOP = "imported", "own loop"
# `evaluated_on` of a loop without `evaluate`, in its summary.json.
LAST_BATCHES = "the last training batches"
LOSS_ON_BATCHES = f"loss on {LAST_BATCHES}"


def check_run_folder(folder: Path) -> None:
    """UserError unless this is a folder with a config.json."""
    if not is_folder(folder):
        why = "it is a file" if exists(folder) else "no such folder"
        raise UserError(f"{str(folder)!r} is not a run folder: {why}")
    if not exists(folder / "config.json"):
        raise UserError(f"{str(folder)!r} is not a run folder: config.json is missing")


def check_has_summary(folder: Path) -> None:
    """UserError if the run in this folder is not finished."""
    if not exists(folder / "summary.json"):
        raise UserError(
            f"{str(folder)!r} is not finished: summary.json is missing; finish it with "
            "the command that began it and --resume, or in a loop of your own with resume=True"
        )


def is_imported(folder: Path) -> bool:
    """Whether the folder holds a model as it was imported, not a run; UserError if neither."""
    check_run_folder(folder)
    data = read_json(folder / "config.json")
    task = data.get("task") if isinstance(data, dict) else None
    return isinstance(task, dict) and task.get("name") == IMPORTED


def exists(path: Path) -> bool:
    """Whether the path exists; UserError if its name is too long or access is denied."""
    with _reading(path):
        return path.exists()


def is_folder(path: Path) -> bool:
    """Whether the path is a folder; UserError if its name is too long or access is denied."""
    with _reading(path):
        return path.is_dir()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{str(path)!r}: cannot be read ({first_line(error)})") from None


def read_json(path: Path, finite: bool = True, most: int = untrusted.LARGEST) -> Any:
    """Return the content of a JSON file; UserError if it is not valid JSON or has a key twice.

    With `finite`, NaN and infinity are errors; figures that a run measured may hold them. A file
    of more than `most` bytes is an error and is not read.
    """
    try:
        return untrusted.read_json(path, finite, most)
    except FileNotFoundError:
        raise UserError(f"{str(path)!r}: no such file") from None
    # ValueError: invalid text or path. RecursionError: lists nested too deeply.
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r}: not a readable JSON file ({first_line(error)})") from None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a log, each a table with a step; nothing if the file does not exist.

    A last line without a newline is skipped: a crash cut it short, or it is being written.
    Any other damaged line is a UserError.
    """
    try:
        with untrusted.open_plain(path) as file:
            lines = iter(lambda: file.readline(_LONGEST_ROW), b"")
            for number, line in enumerate(lines, start=1):
                row = _row(line)
                if row is not None:
                    yield row
                elif line.endswith(b"\n") or len(line) == _LONGEST_ROW:
                    raise UserError(
                        f"{str(path)!r}: line {number} is damaged, it is not a JSON table with a "
                        "step; repair or remove it"
                    )
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{str(path)!r}: cannot be read ({first_line(error)})") from None


def last_row(path: Path) -> dict[str, Any] | None:
    """Return the newest complete row of a log, or None if the log has none.

    Reads the end of the file only, so the cost does not grow with the log. UserError if the row
    is damaged.
    """
    try:
        with untrusted.open_plain(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            # The text after the last newline was cut short, or is being written.
            lines = file.read(_TAIL).split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{str(path)!r}: cannot be read ({first_line(error)})") from None
    if not lines and size <= _TAIL:
        return None
    if not lines or (row := _row(lines[-1])) is None:
        raise UserError(
            f"{str(path)!r}: its last line is damaged, it is not a JSON table with a step"
        )
    return row


def _row(line: bytes) -> dict[str, Any] | None:
    """Parse one line; None if it is too long or is not a table with a step."""
    if len(line) == _LONGEST_ROW:
        return None
    try:
        row = untrusted.parse_light(line, finite=False, most=_MOST_VALUES)
        return row if type(row["step"]) is int else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
