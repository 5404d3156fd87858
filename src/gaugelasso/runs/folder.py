"""The run folder: all files of one run. Reports read nothing else.

config.json       resolved configuration
environment.json  versions, hardware, commit, date, command
metrics.jsonl     one row per logging interval
events.jsonl      one row per structural event
resumed.jsonl     one row per resume: step, versions, hardware, ...
samples.npz       examples of the finished model's output, if the task has any
summary.json      the outcome; written last
serving.json      what `bench --inference` has measured of the final model
checkpoints/      the newest few states, and those that held the target (see checkpoint.py)
reference.json    with target.above_full, the loss of the full model and where it was measured
reference/        the run of the full model, if this run has trained it
tokenizer.json    with the task `tokens`, its tokenizer, and other files of it
prune.json        the plan of `prune`, cofi.json of `cofi`, torch-pruning.json of `torch-pruning`
initial.json      structure and widths before training, and the direction of the metric
unsaved           exists until the first checkpoint is written
run.lock          exists while a process writes to the folder (see files/lock.py)

This module opens, protects and writes a run folder. It does not decide when to write.
"""

import contextlib
import io
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy

from gaugelasso.errors import UserError
from gaugelasso.files import durable, lock, tokenizer
from gaugelasso.runs import logs
from gaugelasso.runs.plans import PLANS
from gaugelasso.runs.reading import SERVING, read_json
from gaugelasso.runs.writing import (
    check_name,
    make_folder,
    write_bytes,
    write_json,
    write_text,
    writing,
)

_logger = logging.getLogger(__name__)
Existing = Literal["refuse", "resume", "overwrite"]
CHECKPOINTS = "checkpoints"
# The run of the full model that a run may be measured by, and what it found.
REFERENCE, REFERENCE_FILE = "reference", "reference.json"
TENSORBOARD = "tensorboard"  # what `train --tensorboard` writes
# Distinguishes a run that never had a checkpoint from a run that lost its checkpoints.
UNSAVED = "unsaved"
# The sections of a config. Only the config.json of a run has all of them.
CONFIG_SECTIONS = ("task", "model", "target", "compress", "train")
_CLEARING = "overwriting.tmp"  # exists while an older run is being removed
# Removed in the opposite order when a run is overwritten.
_FILES = (
    "config.json",
    "environment.json",
    REFERENCE_FILE,
    "initial.json",
    "metrics.jsonl",
    "events.jsonl",
    logs.RESUMED,
    "samples.npz",
    SERVING,
    "summary.json",
    UNSAVED,
    *PLANS.values(),
    *tokenizer.KEPT,
)


class RunFolderBase(ABC):
    """The operations on its folder that a run uses, on every rank."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / CHECKPOINTS

    @abstractmethod
    def write(self, name: str, data: Any) -> None:
        """Write a JSON file; after a crash it is complete or does not exist."""

    @abstractmethod
    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file; after a crash it is complete or does not exist."""

    @abstractmethod
    def write_arrays(self, name: str, arrays: Mapping[str, numpy.ndarray]) -> None:
        """Write an .npz file; after a crash it is complete or does not exist."""

    @abstractmethod
    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add a row to one of the logs."""

    @abstractmethod
    def sync(self) -> dict[str, logs.Mark]:
        """Flush the logs to the disk and return a mark of where each ends.

        Called before a checkpoint is written: the rows that it refers to must be on the disk.
        """

    @abstractmethod
    def saved(self) -> None:
        """Record that a checkpoint was written: from now on, having none means that it is lost."""

    @abstractmethod
    def rewind(self, marks: Mapping[str, logs.Mark] | None = None, step: int = 0) -> None:
        """Remove the rows after these marks, or all rows: training writes them again from `step`.

        UserError, with nothing changed, if the rows before a mark are not the ones it was made of.
        """

    @abstractmethod
    def reopen(self) -> None:
        """Remove the outcome of the run, because the run continues."""

    @abstractmethod
    def close(self) -> None:
        """Release the folder to other processes."""


class RunFolder(RunFolderBase):
    """A run folder that this process alone writes to. Open it with `RunFolder.open`."""

    def __init__(self, path: Path):
        super().__init__(path)
        make_folder(path)
        self._lock = lock.FolderLock(path)
        self._logs = {name: logs.Log(path / name) for name in logs.NAMES}

    @classmethod
    def open(cls, path: Path, existing: Existing = "refuse") -> "RunFolder":
        """Make the folder, or refuse, continue or replace the run that is in it."""
        check_name(path)
        if path.exists() and not path.is_dir():
            raise UserError(f"output {str(path)!r} is a file; give a folder")
        if not is_free(path):
            if existing == "refuse":
                cls.check_free(path)
            if not _is_run(path):
                raise UserError(
                    f"output {str(path)!r} is not a run folder: it has no config.json of a run; "
                    "nothing was changed"
                )
        folder = cls(path)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(folder.close)
            if existing == "overwrite" or (path / _CLEARING).exists():
                folder._clear()
            folder._check_checkpoints()
            on_failure.pop_all()
        return folder

    @staticmethod
    def check_free(path: Path) -> None:
        """UserError if the folder holds anything already."""
        check_name(path)
        if path.exists() and (not path.is_dir() or not is_free(path)):
            raise UserError(
                f"output {str(path)!r} already exists; add --resume to go on with it, "
                "--overwrite to replace it, or choose another --out"
            )

    def _check_checkpoints(self) -> None:
        """UserError if the checkpoints are elsewhere, where another run could write to them too.

        The lock of this folder does not protect them there, and each run removes checkpoints of
        steps that it did not write.
        """
        if self.checkpoints.is_symlink():
            raise UserError(
                f"{str(self.checkpoints)!r} is a symbolic link to "
                f"{str(self.checkpoints.readlink())!r}, which other runs may use; replace the link "
                "by the folder itself. To use another disk, move the whole run folder there and "
                "link to that"
            )

    def _clear(self) -> None:
        """Remove the files of a run, and no others.

        If it is interrupted, the next process that opens the folder finishes it.
        """
        write_text(self.path / _CLEARING, "")
        for name in (CHECKPOINTS, REFERENCE, "report", TENSORBOARD, *reversed(_FILES), _CLEARING):
            with writing(self.path / name):
                durable.remove(self.path / name)
                durable.remove(self.path / f"{name}.tmp")

    def write(self, name: str, data: Any) -> None:
        write_json(self.path / name, data)

    def write_bytes(self, name: str, data: bytes) -> None:
        write_bytes(self.path / name, data)

    def write_arrays(self, name: str, arrays: Mapping[str, numpy.ndarray]) -> None:
        buffer = io.BytesIO()
        numpy.savez_compressed(buffer, allow_pickle=False, **arrays)
        self.write_bytes(name, buffer.getvalue())

    def append(self, name: str, row: dict[str, Any]) -> None:
        with writing(self.path / name):
            self._logs[name].append(row)

    def sync(self) -> dict[str, logs.Mark]:
        for log in self._logs.values():
            with writing(log.path):
                log.sync()
        return {name: log.mark() for name, log in self._logs.items()}

    def saved(self) -> None:
        with writing(self.path / UNSAVED):
            durable.remove(self.path / UNSAVED)

    def rewind(self, marks: Mapping[str, logs.Mark] | None = None, step: int = 0) -> None:
        if marks is None:
            write_text(self.path / UNSAVED, "")
        for name, mark in (marks or {}).items():
            try:
                self._logs[name] = logs.Log.at_mark(self.path / name, mark)
            except UserError as error:
                if name != logs.RESUMED:
                    raise UserError(
                        f"{error}; restore the file, or start again with --overwrite"
                    ) from None
                # No later step depends on this log.
                _logger.warning("warning: %s; a new log is started", error)
        for log in self._logs.values():
            with writing(log.path):
                log.truncate()
        with contextlib.suppress(UserError, TypeError, KeyError):
            if read_json(self.path / "summary.json")["steps"] == step:
                return  # it is of exactly this step, and stays until the next one
        self.reopen()

    def reopen(self) -> None:
        for name in ("samples.npz", SERVING, "summary.json"):
            with writing(self.path / name):
                durable.remove(self.path / name)

    def close(self) -> None:
        self._lock.release()


class ReadOnlyRunFolder(RunFolderBase):
    """The run folder on ranks other than 0: they read from it, and only rank 0 writes."""

    def write(self, name: str, data: Any) -> None:
        pass

    def write_bytes(self, name: str, data: bytes) -> None:
        pass

    def write_arrays(self, name: str, arrays: Mapping[str, numpy.ndarray]) -> None:
        pass

    def append(self, name: str, row: dict[str, Any]) -> None:
        pass

    def sync(self) -> dict[str, logs.Mark]:
        return {}

    def saved(self) -> None:
        pass

    def rewind(self, marks: Mapping[str, logs.Mark] | None = None, step: int = 0) -> None:
        pass

    def reopen(self) -> None:
        pass

    def close(self) -> None:
        pass


def is_free(path: Path) -> bool:
    """Whether the folder is missing, empty, or left by a run that died before its config.json."""
    traces = {lock.NAME, "config.json.tmp", _CLEARING, f"{_CLEARING}.tmp"}
    return not path.is_dir() or all(entry.name in traces for entry in path.iterdir())


def _is_run(path: Path) -> bool:
    """Whether this is a run folder, even a damaged one.

    Other programs also write a config.json, so its sections decide. If it cannot be read, the
    other files of a run decide.
    """
    if not (path / "config.json").exists():
        return False
    with contextlib.suppress(UserError, TypeError):
        return set(read_json(path / "config.json")) >= set(CONFIG_SECTIONS)
    return any((path / name).exists() for name in ("initial.json", UNSAVED, _CLEARING, *logs.NAMES))
