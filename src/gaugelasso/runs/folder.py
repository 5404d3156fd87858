"""The run folder: everything a run leaves behind, and all that reports read.

config.json       resolved configuration
environment.json  versions, hardware, commit, date, command
metrics.jsonl     one row per log interval
events.jsonl      one row per structural event
resumed.jsonl     one row per checkpoint from which it went on: step, versions, hardware, ...
samples.npz       what the task shows of the finished model, where it shows something
summary.json      the outcome; written last
checkpoints/      the newest few states, and those that held the target (see checkpoint.py)
initial.json      structure and widths before training, and how to read the metric
unsaved           there until the first checkpoint is written
run.lock          there while a run is writing (see lock.py)
"""

import contextlib
import datetime
import io
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy
import torch

from gaugelasso.errors import UserError, first_line
from gaugelasso.files import durable, lock, untrusted
from gaugelasso.runs import logs
from gaugelasso.version import __version__

_logger = logging.getLogger(__name__)
Existing = Literal["refuse", "resume", "overwrite"]
CHECKPOINTS = "checkpoints"
# Where there is no checkpoint, it tells a run that never had one from a run that lost them.
UNSAVED = "unsaved"
# Sections of a run's configuration; config.py holds one dataclass for each.
CONFIG_SECTIONS = ("task", "model", "target", "compress", "train")
# There while an older run is being removed.
_CLEARING = "overwriting.tmp"
# Bytes and values of a row: an event has some for every axis, of which there may be thousands.
_LONGEST_ROW, _MOST_VALUES = 2**24, 2**18
# Bytes at the end of a log that are read for its last row: of figures, which are few.
_TAIL = 2**16


class RunFolder:
    """A folder that is being written, by nobody else. Open with `RunFolder.open`."""

    def __init__(self, path: Path):
        self.path = path
        make_folder(path)
        self._lock = lock.FolderLock(path)
        self._logs = {name: logs.Log(path / name) for name in logs.NAMES}

    @classmethod
    def open(cls, path: Path, existing: Existing = "refuse") -> "RunFolder":
        """Make the folder, or take an existing one as told; never mix two runs."""
        _check_name(path)
        if path.exists() and not path.is_dir():
            raise UserError(f"output {str(path)!r} is a file; give a folder")
        if not _is_free(path):
            if existing == "refuse":
                cls.check_free(path)
            if not _is_run(path):
                raise UserError(
                    f"output {str(path)!r} holds no run (no config.json of one); left alone"
                )
        folder = cls(path)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(folder.close)
            if existing == "overwrite" or (path / _CLEARING).exists():
                folder._clear()
            on_failure.pop_all()
        return folder

    def _clear(self) -> None:
        """Remove a run's own files.

        Broken off anywhere, it is done by whoever opens the folder next: half a run is none.
        """
        write_text(self.path / _CLEARING, "")
        for name in (CHECKPOINTS, "report", *reversed(_FILES), _CLEARING):
            with _writing(self.path / name):
                durable.remove(self.path / name)
                durable.remove(self.path / f"{name}.tmp")

    def close(self) -> None:
        """Let others write here."""
        self._lock.release()

    @staticmethod
    def check_free(path: Path) -> None:
        """UserError if something is there already."""
        _check_name(path)
        if path.exists() and (not path.is_dir() or not _is_free(path)):
            raise UserError(
                f"output {str(path)!r} already exists; add --resume to go on with it, "
                "--overwrite to replace it, or choose another --out"
            )

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def write(self, name: str, data: Any) -> None:
        """A JSON file, complete or not there at all."""
        write_json(self.path / name, data)

    def write_arrays(self, name: str, arrays: Mapping[str, numpy.ndarray]) -> None:
        """An .npz file, complete or not there at all."""
        held = io.BytesIO()
        numpy.savez_compressed(held, allow_pickle=False, **arrays)
        _write(self.path / name, held.getvalue())

    def append(self, name: str, row: dict[str, Any]) -> None:
        """A row to one of the logs."""
        with _writing(self.path / name):
            self._logs[name].append(row)

    def sync(self) -> dict[str, logs.Mark]:
        """Before a checkpoint: flush the logs to the disk, and mark where they end.

        A checkpoint must not outlive the rows before it.
        """
        for log in self._logs.values():
            with _writing(log.path):
                log.sync()
        return {name: log.mark() for name, log in self._logs.items()}

    def saved(self) -> None:
        """A checkpoint was written: from now on one is missed if there is none."""
        with _writing(self.path / UNSAVED):
            durable.remove(self.path / UNSAVED)

    def rewind(self, marks: Mapping[str, logs.Mark] | None = None, step: int = 0) -> None:
        """Forget rows after these marks, or all: they will be written again from `step` on.

        UserError, with nothing changed, where those before a mark are not as they were.
        """
        if marks is None:
            write_text(self.path / UNSAVED, "")
        for name, mark in (marks or {}).items():
            try:
                self._logs[name] = logs.Log.known(self.path / name, mark)
            except UserError as error:
                if name != logs.RESUMED:  # on which nothing hangs that is to come
                    raise
                _logger.warning("warning: %s; it begins anew", error)
        for log in self._logs.values():
            with _writing(log.path):
                log.cut()
        if not self._ended_at(step):
            self.reopen()

    def _ended_at(self, step: int) -> bool:
        """Whether the outcome is of this very step: it stays until there is another."""
        with contextlib.suppress(UserError, TypeError, KeyError):
            return bool(read_json(self.path / "summary.json")["steps"] == step)
        return False

    def reopen(self) -> None:
        """The run goes on: it has no outcome yet."""
        for name in ("samples.npz", "summary.json"):
            with _writing(self.path / name):
                durable.remove(self.path / name)


class ReadOnlyRunFolder(RunFolder):
    """The run folder as ranks but the first see it: where to read, while rank 0 writes."""

    def __init__(self, path: Path):
        self.path = path

    def __getattribute__(self, name: str) -> Any:
        # All that a folder can be told to do, for what is added to it must not write here either.
        found = super().__getattribute__(name)
        return (lambda *_: None) if callable(found) else found


_FILES = (
    "config.json",
    "environment.json",
    "initial.json",
    "metrics.jsonl",
    "events.jsonl",
    logs.RESUMED,
    "samples.npz",
    "summary.json",
    UNSAVED,
)


def _is_free(path: Path) -> bool:
    """Nothing there, or nothing but what a run that died at its very beginning leaves."""
    traces = {lock.NAME, "config.json.tmp", _CLEARING, f"{_CLEARING}.tmp"}
    return not path.is_dir() or all(entry.name in traces for entry in path.iterdir())


def _is_run(path: Path) -> bool:
    """Whether this is a run, however damaged; others have a config.json and logs, too."""
    if not (path / "config.json").exists():
        return False
    with contextlib.suppress(UserError, TypeError):
        return set(read_json(path / "config.json")) >= set(CONFIG_SECTIONS)
    return any((path / name).exists() for name in ("initial.json", UNSAVED, _CLEARING, *logs.NAMES))


def _check_name(path: Path) -> None:
    """UserError where no file could have that name, or none that safetensors would read."""
    try:
        str(path).encode()
        path.exists()
    except UnicodeEncodeError:
        raise UserError(f"output {str(path)!r} is no UTF-8 text; choose another --out") from None
    except OSError as error:
        raise UserError(f"output {str(path)!r} cannot be made: {error.strerror}") from None


def make_folder(path: Path) -> None:
    _check_name(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output {str(path)!r} cannot be made: {error.strerror}") from None


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """A text file, complete or not there at all."""
    # Names of files may hold what is no text.
    _write(path, text.encode(errors="backslashreplace"))


def _write(path: Path, data: bytes) -> None:
    with _writing(path):
        durable.replace_file(path, [data])


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"output {str(path)!r} cannot be written: {error.strerror}") from None


def read_json(path: Path, finite: bool = True, most: int = untrusted.LARGEST) -> Any:
    """What a JSON file says; UserError where it is none, says a thing twice, or has no end.

    Numbers must be `finite` but in figures, where a run may have measured otherwise. Files of more
    than `most` bytes are not read.
    """
    try:
        return untrusted.read_json(path, finite, most)
    except FileNotFoundError:
        raise UserError(f"{str(path)!r}: no such file") from None
    # ValueError: whatever is wrong with the text; RecursionError: lists in lists in lists.
    except (OSError, ValueError, RecursionError) as error:
        said = first_line(error)
        raise UserError(f"{str(path)!r}: not a readable JSON file ({said})") from None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a log, each a table with a step; a last line cut short by a crash is left out.

    UserError where another is damaged.
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
                        f"{str(path)!r}: line {number} is damaged, no table with a step; mend or "
                        "remove it"
                    )
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{str(path)!r}: cannot be read ({first_line(error)})") from None


def last_row(path: Path) -> dict[str, Any] | None:
    """The newest whole row of a log, however long that is; None if there is none.

    UserError where it is damaged.
    """
    try:
        with untrusted.open_plain(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            # What follows the last newline was cut short, or is being written.
            lines = file.read(_TAIL).split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{str(path)!r}: cannot be read ({first_line(error)})") from None
    if not lines and size <= _TAIL:
        return None
    if not lines or (row := _row(lines[-1])) is None:
        raise UserError(f"{str(path)!r}: its last line is damaged, no table with a step")
    return row


def _row(line: bytes) -> dict[str, Any] | None:
    """What a line says; None where it is too long, or says nothing of a step."""
    if len(line) == _LONGEST_ROW:
        return None
    try:
        row = untrusted.parse_light(line, finite=False, most=_MOST_VALUES)
        return row if type(row["step"]) is int else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def environment(device: str) -> dict[str, Any]:
    """What a figure needs beside it to be repeated."""
    return {
        "gaugelasso": __version__,
        "commit": _commit(),
        "command": " ".join(["gaugelasso", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def hardware(device: str) -> str:
    """The device in words."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU, {os.cpu_count()} cores ({platform.machine()})"


def _commit() -> str | None:
    """Hash of the source this package runs from, '+' when it was changed; None if unknown.

    GAUGELASSO_COMMIT names it where the code was copied without its repository.
    """
    if told := os.environ.get("GAUGELASSO_COMMIT"):
        return told
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        return head + ("+" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.CalledProcessError):
        return None
