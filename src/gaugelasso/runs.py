"""The run folder: everything a run leaves behind, and all that reports read.

config.json       resolved configuration
environment.json  versions, hardware, commit, date, command
metrics.jsonl     one row per log interval
events.jsonl      one row per structural event
samples.npz       what the task shows of the finished model, where it shows something
summary.json      the outcome; written last
checkpoint/       the newest state (see checkpoint.py)
initial.json      structure and widths before training, and how to read the metric
"""

import contextlib
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy
import torch

from gaugelasso.errors import UserError
from gaugelasso.version import __version__

Existing = Literal["refuse", "resume", "overwrite"]


class RunFolder:
    """A folder that is being written. Open with `RunFolder.open`."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def open(cls, path: Path, existing: Existing = "refuse") -> "RunFolder":
        """Make the folder, or take an existing one as told; never mix two runs."""
        if path.exists() and not path.is_dir():
            raise UserError(f"output {str(path)!r} is a file; give a folder")
        if path.exists() and any(path.iterdir()):
            if existing == "refuse":
                cls.check_free(path)
            is_run = (path / "config.json").exists()
            if not is_run:
                raise UserError(f"output {str(path)!r} holds no run (no config.json); left alone")
            if existing == "overwrite":
                for name in (*_FILES, "checkpoint", "checkpoint.old", "checkpoint.tmp", "report"):
                    _remove(path / name)
        make_folder(path)
        return cls(path)

    @staticmethod
    def check_free(path: Path) -> None:
        """UserError if something is there already."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(
                f"output {str(path)!r} already exists; add --resume to go on with it, "
                "--overwrite to replace it, or choose another --out"
            )

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    def write(self, name: str, data: Any) -> None:
        """A JSON file, complete or not there at all."""
        write_json(self.path / name, data)

    def write_arrays(self, name: str, arrays: Mapping[str, numpy.ndarray]) -> None:
        """An .npz file, complete or not there at all."""
        path = self.path / name
        aside = path.with_name(path.name + ".tmp")
        with aside.open("wb") as file:
            numpy.savez_compressed(file, allow_pickle=False, **arrays)
        os.replace(aside, path)

    def append(self, name: str, row: dict[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rewind(self, step: int) -> None:
        """Forget rows after `step`: they will be written again."""
        for name in ("metrics.jsonl", "events.jsonl"):
            kept = [row for row in read_rows(self.path / name) if row["step"] <= step]
            text = "".join(json.dumps(row) + "\n" for row in kept)
            write_text(self.path / name, text)
        for name in ("samples.npz", "summary.json"):
            _remove(self.path / name)


_FILES = (
    "config.json",
    "environment.json",
    "initial.json",
    "metrics.jsonl",
    "events.jsonl",
    "samples.npz",
    "summary.json",
)


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output {str(path)!r} cannot be made: {error.strerror}") from None


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write aside, then rename: a reader never sees half a file."""
    aside = path.with_name(path.name + ".tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise UserError(f"output {str(path)!r} cannot be written: {error.strerror}") from None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{str(path)!r}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{str(path)!r}: not a readable JSON file ({error})") from None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a .jsonl file; a last line cut short by a crash is left out."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


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
