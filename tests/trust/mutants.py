"""A run folder with one damaged file, and whether the damage is detected.

The run could be resumed if that file of its only checkpoint was not damaged.
"""

import gzip
import io
import json
import lzma
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaugelasso.config import Config, load_config
from gaugelasso.errors import UserError
from gaugelasso.files.untrusted import read_arrays
from gaugelasso.runs.checkpoint import load_spec
from gaugelasso.tasks import images, text
from gaugelasso.training.trainer import Trainer
from tests.tiny_runs import sign
from tests.trust import damage

PARTS = (
    "structure.json",
    "model.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "state.json",
    "manifest.json",
)


@dataclass(frozen=True)
class Mutant:
    """`spoil` is called with the folder of an intact checkpoint."""

    name: str
    file: str
    spoil: Callable[[Path], None]
    knowing: bool = False

    def __str__(self) -> str:
        return f"{self.file}, {'knowing' if self.knowing else 'blind'}: {self.name}"


def mutants(path: Path, older: Path, often: int, most: int) -> Iterator[Mutant]:
    """Yield damages of a checkpoint: `often` of each random kind, `most` of each place."""
    chance = random.Random(7)
    for file in PARTS:
        data = (path / file).read_bytes()
        for name, change in damage.blind(len(data), chance, often):
            yield Mutant(name, file, changed(file, change))
        for name, _ in damage.strange(path / file):
            yield Mutant(name, file, _strange(file, name))
        # Generators that are not drawn from have the same state at every step.
        if (older / file).read_bytes() != data:
            yield Mutant("of another step", file, changed(file, _content(older / file)))
        others = [other for other in PARTS if other != file]
        for other in others:
            yield Mutant(f"is {other}", file, changed(file, _content(path / other)))
        if file.endswith(".json"):
            held = damage.knowing_json(json.loads(data), chance, most, file != "state.json")
        else:
            held = damage.knowing_tensors(data, chance, most)
        for name, change in held:
            yield Mutant(name, file, changed(file, change, file != "manifest.json"), True)
        if file == "state.json":
            # Tensors of another step with a matching manifest are a valid checkpoint.
            old = changed(file, _content(older / file), signed=True)
            yield Mutant("of another step", file, old, knowing=True)


def _content(path: Path) -> damage.Bytes:
    data = path.read_bytes()
    return lambda _: data


def changed(file: str, change: damage.Bytes, signed: bool = False) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        data = change((folder / file).read_bytes())
        for name in {file, "manifest.json"}:
            _own(folder / name)
        (folder / file).write_bytes(data)
        if signed:
            sign(folder)

    return spoil


def _own(path: Path) -> None:
    """Replace a hard link to the intact file by a copy."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def _strange(file: str, name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / file
        path.rename(path.with_name(path.name + ".good"))
        dict(damage.strange(path))[name]()

    return spoil


@dataclass(frozen=True)
class Patient:
    """An interrupted run, of which copies are damaged."""

    config: Config
    run: Path
    checkpoint: str  # the name of its newest checkpoint

    def copy(self, home: Path) -> Path:
        """Copy the run with its newest checkpoint only; fast, because files are hard links."""
        run = home / "run"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        for path in self.run.glob("*.json*"):
            shutil.copy(path, run)
        ring = Path("checkpoints")
        good = self.run / ring / self.checkpoint
        shutil.copytree(good, run / ring / self.checkpoint, copy_function=os.link)
        return run


def refusal(patient: Patient, mutant: Mutant, home: Path) -> str | None:
    """Return what is wrong with the handling of a mutant; None if it is refused correctly."""
    run = patient.copy(home)
    checkpoint = run / "checkpoints" / patient.checkpoint
    mutant.spoil(checkpoint)
    return _told(lambda: Trainer(patient.config, run, "resume"), str(checkpoint))


def _told(attempt: Callable[[], object], name: str) -> str | None:
    """Return None if `attempt` ends in a UserError of one line with this name in it."""
    try:
        attempt()
    except UserError as error:
        message = str(error)
        if name not in message:
            return f"does not name the file: {message}"
        return None if len(message.splitlines()) == 1 else f"several lines: {message}"
    except Exception as error:  # any other exception is a fault
        return f"{type(error).__name__}: {error}"
    return "accepted"


def lone_structures(path: Path, most: int) -> Iterator[tuple[str, bytes]]:
    """Yield damaged structure files as a user may give them, without a manifest."""
    data = path.read_bytes()
    for name, change in damage.knowing_json(json.loads(data), random.Random(8), most, True):
        # A structure with one site less is valid, too.
        if not re.search(r"\.\d+ missing", name):
            yield name, change(data)


def refused_structure(data: bytes, path: Path) -> str | None:
    path.write_bytes(data)
    return _told(lambda: load_spec(path), str(path))


def blind_configs(data: bytes, often: int) -> Iterator[tuple[str, bytes]]:
    """Yield damaged TOML; some of it is valid TOML with another meaning."""
    for name, change in damage.blind(len(data), random.Random(9), often):
        yield name, change(data)
    yield "deep", b"x = " + b"[" * 100_000
    yield "many digits", b"[train]\nsteps = " + b"9" * 5000
    yield "a key twice", data + b"\n[train]\nsteps = 3\n"


def refused_config(data: bytes, path: Path) -> str | None:
    path.write_bytes(data)
    return _told(lambda: load_config(path), str(path))


# --- data -----------------------------------------------------------------------------------

_TEXT = b"".join(b"line %d of a text\n" % number for number in range(400))
_PACKERS = {".gz": gzip.compress, ".xz": lzma.compress}
_ARRAYS = {
    f"{part}_{what}": np.arange(300, dtype=np.uint8) if what == "data" else np.array([0, 90, 300])
    for part in images.PARTS
    for what in ("data", "offsets")
}


def blind_texts(often: int) -> Iterator[tuple[str, bytes]]:
    """Yield damaged packed texts, each with its suffix. Any plain text is valid."""
    for suffix, pack in _PACKERS.items():
        data = pack(_TEXT)
        for name, change in damage.blind(len(data), random.Random(10), often):
            # Two packed files in sequence are a valid packed file.
            if name != "twice":
                yield suffix, change(data)


def met_text(data: bytes, suffix: str, home: Path) -> str | None:
    path = home / f"text.txt{suffix}"
    path.write_bytes(data)
    held: list[bytes] = []
    cache = Path(tempfile.mkdtemp(dir=home))
    message = _told(lambda: held.append(text.load([path], cache).tobytes()), str(path))
    if not held or held == [b""]:  # empty, which the task refuses
        return message if not held else None
    return "the same" if held == [_TEXT] else "another text"


def blind_arrays(often: int) -> Iterator[bytes]:
    """Yield damaged packed images."""
    for save in (np.savez, np.savez_compressed):
        held = io.BytesIO()
        save(held, allow_pickle=False, **_ARRAYS)
        data = held.getvalue()
        for _, change in damage.blind(len(data), random.Random(11), often):
            yield change(data)
        yield data.replace(b"(300,), }" + b" " * 13, b"(1125899906842624,), }")


def met_array(data: bytes, home: Path) -> str | None:
    path = home / "images.npz"
    path.write_bytes(data)
    held: list[dict[str, np.ndarray]] = []
    message = _told(lambda: held.append(read_arrays(path)), str(path))
    if not held:
        return message
    kept = {name: array for name, array in held[0].items() if name in _ARRAYS}
    missing = _ARRAYS.keys() - kept.keys()  # which the task refuses
    same = all(np.array_equal(array, _ARRAYS[name]) for name, array in kept.items())
    return None if missing else "the same" if same else "other arrays"
