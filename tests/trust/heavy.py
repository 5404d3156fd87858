"""Small files that would need much memory, and pipes: tried for every kind of file that is read.

A row for each kind: where the file is in a run folder, and the function that reads it.
"""

import io
import os
import re
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaugelasso.config import load_config
from gaugelasso.errors import UserError
from gaugelasso.files.untrusted import MOST_VALUES
from gaugelasso.report.data import load_run
from gaugelasso.runs import checkpoint, logs
from gaugelasso.tasks import images
from gaugelasso.training.trainer import Trainer
from tests.trust.memory import Peak
from tests.trust.mutants import Patient, changed

# Memory that a reader may use, however small the file.
_ITS_OWN = 2**22
# Seconds after which a reader of a pipe counts as blocked.
PATIENCE = 20
_LISTS = b"[" + b"[]," * 2**19 + b"[]]"
_NUMBERS = b"[" + b"257," * MOST_VALUES + b"257]"


class Waits(BaseException):
    """A reader is blocked. Not an OSError, which the reader would turn into a UserError."""


@dataclass(frozen=True)
class Kind:
    """`read` is called with the run folder, in which `file` is damaged."""

    file: str
    read: Callable[[Path], object]
    before: bytes = b""  # with `behind`: the text around a list that makes it a file of this kind
    behind: bytes = b""


def _checkpoint(run: Path) -> None:
    checkpoint.load_model(run)
    checkpoint.load_state(run)


def kinds(patient: Patient) -> Iterator[Kind]:
    newest = f"checkpoints/{patient.checkpoint}"
    for part in ("manifest.json", "structure.json", "state.json"):
        yield Kind(f"{newest}/{part}", _checkpoint)
    header = len(_LISTS).to_bytes(8, "little")
    for part in ("model.safetensors", "optimizer.safetensors"):
        yield Kind(f"{newest}/{part}", _checkpoint, header)
    yield Kind("structure.json", lambda run: checkpoint.load_spec(run / "structure.json"))
    yield Kind("config.toml", lambda run: load_config(run / "config.toml"), b"x = ")
    for name in ("config.json", "environment.json", "initial.json", "summary.json"):
        yield Kind(name, load_run)
    for name in logs.NAMES:
        yield Kind(name, load_run, b'{"step": 1, "x": ', b"}\n")
    yield Kind("samples.npz", lambda run: load_run(run).samples())
    yield Kind("images.npz", lambda run: images.load(str(run / "images.npz"), 4))


def contents(kind: Kind) -> Iterator[tuple[str, bytes]]:
    """Yield contents of a megabyte or more that would need much more memory."""
    if kind.file.endswith(".npz"):
        yield "an archive that grows", _grown()
        yield "an archive of many", _many()
    else:
        yield "many small lists", kind.before + _LISTS + kind.behind
        if kind.file in ("structure.json", "metrics.jsonl"):  # the others have the same reader
            yield "many numbers", kind.before + _NUMBERS + kind.behind


def _grown() -> bytes:
    held = io.BytesIO()
    np.savez_compressed(held, allow_pickle=False, train_data=np.zeros(80 * 2**20, np.uint8))
    return held.getvalue()


def _many() -> bytes:
    """Return an archive whose directory lists a hundred thousand equal files."""
    count = 10**5
    entry = b"PK\1\2" + struct.pack("<6H3L5H2L", 20, 20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0)
    directory = (entry + b"a") * count
    number = count & 0xFFFF
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, number, number, len(directory), 0, 0)
    return directory + end


def weigh(patient: Patient, kind: Kind, data: bytes, home: Path) -> str | None:
    """Return what is wrong with the handling of this content; None if it is refused cheaply."""
    run = patient.copy(home)
    path = run / kind.file
    if path.parent == run:
        path.write_bytes(data)
    else:
        changed(path.name, lambda _: data, signed=path.name != "manifest.json")(path.parent)
    with Peak() as peak:
        message = met(kind, run)
    most = 2 * len(data) + _ITS_OWN
    heavy = f"{peak.bytes:,} bytes of memory for {len(data):,}"
    return message or (heavy if peak.bytes > most else None)


def met(kind: Kind, run: Path) -> str | None:
    """Return None if reading ends in a UserError of one line that names the file."""
    try:
        kind.read(run)
    except UserError as error:
        named = str(run) in str(error) and Path(kind.file).name in str(error)
        named = named and "\n" not in str(error)
        return None if named else f"does not name the file in a line: {error}"
    return "accepted"


def piped(patient: Patient, kind: Kind, home: Path) -> str | None:
    """Return what is wrong with the handling of a pipe, by its reader and by --resume."""
    run = patient.copy(home)
    (run / kind.file).unlink(missing_ok=True)
    os.mkfifo(run / kind.file)
    message = _in_time(kind, run)
    # A resumed run does not read the others.
    if message or not re.search(r"checkpoints|config\.json|jsonl", kind.file):
        return message
    return _in_time(Kind(kind.file, lambda run: Trainer(patient.config, run, "resume")), run)


def _in_time(kind: Kind, run: Path) -> str | None:
    def hangs(*_: object) -> None:
        raise Waits("waits for ever")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(PATIENCE)
    try:
        return met(kind, run)
    except Waits as error:
        return str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
