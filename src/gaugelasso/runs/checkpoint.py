"""Checkpoints: tensors as safetensors, structure as JSON, a manifest of all files, no pickle.

    step-00001000/
      structure.json         what the network is built from (see structures.py)
      model.safetensors      every parameter and buffer, including riders and slow norm weights
      optimizer.safetensors  momentum, second moments, rho, loss averages, rates, flags
      random.safetensors     torch's random number generators, of every device
      state.json             the state of training: step, phase, figures not yet logged, and a
                             mark of where each log of the run ended
      manifest.json          length and SHA-256 of each file; written last

A checkpoint is written under a temporary name, flushed to the disk and renamed. The newest few
are kept. If one is damaged, the one before it is used, with a warning, and the damaged one is
renamed when the run resumes.

The next step depends on nothing else. Batches are a function of (seed, step, stream), so the data
have no other state than the step. The schedule is a function of the step and of the step at which
the structure was frozen. The history of events is in the run's events.jsonl.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from gaugelasso.axes import Compressible, named_tensors
from gaugelasso.errors import UserError, errors_of
from gaugelasso.files.durable import remove, rename, sync, write_new
from gaugelasso.files.tensors import encoded, read_tensors
from gaugelasso.models import TransformerSpec
from gaugelasso.runs.filling import fill_
from gaugelasso.runs.logs import Mark, is_marks
from gaugelasso.runs.manifest import NAME as MANIFEST
from gaugelasso.runs.manifest import check_manifest, write_manifest
from gaugelasso.runs.reading import exists, is_folder, read_json
from gaugelasso.runs.rng import rng_state, set_rng_state_
from gaugelasso.runs.rotation import (
    DAMAGED,
    REPLACED,
    name_of,
    newest_first,
    remove_older,
    step_of,
)
from gaugelasso.runs.structures import Structure, check_rebuildable, described_alone

# Default of `save`. A run passes `train.checkpoint_keep`.
KEPT = 2
_PARTS = (
    "structure.json",
    "model.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "state.json",
)
_log = logging.getLogger(__name__)


class Savable(Protocol):
    """What `save` needs; a Compressor provides it, and so does a step of training."""

    model: Compressible

    @property
    def steps(self) -> int: ...

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything except the model that the next step depends on."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose files are bit-identical to those that were written. Get one with `find`."""

    path: Path
    step: int

    def structure(self) -> Structure:
        return Structure.read(self.path / "structure.json")

    def fingerprint(self) -> str:
        """SHA-256 of structure and weights, from the digests of their files."""
        files = read_json(self.path / MANIFEST)["files"]
        digests = (files[name]["sha256"] for name in ("structure.json", "model.safetensors"))
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def model(self, device: str = "cpu") -> Compressible:
        path = self.path / "model.safetensors"
        model = self.structure().build(weights=path)
        fill_(model, read_tensors(path), path)
        return model.to(device)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state of training, without the logs' marks, and the optimizer's tensors."""
        state = self._state()
        state.pop("logs", None)
        return state, read_tensors(self.path / "optimizer.safetensors")

    def marks(self) -> dict[str, Mark]:
        """Return the marks of the run's logs at this step."""
        marks: Any = self._state().get("logs")
        if not is_marks(marks):
            path = self.path / "state.json"
            raise UserError(f"{str(path)!r}: not a run's state, logs = {str(marks)[:60]}")
        return marks

    def _state(self) -> dict[str, Any]:
        path = self.path / "state.json"
        state = read_json(path)
        steps = state.get("steps") if isinstance(state, dict) else None
        if type(steps) is not int or steps != self.step:
            raise UserError(f"{str(path)!r}: not the state after step {self.step}")
        return state

    def restore_random_(self) -> None:
        """Restore torch's random number generators."""
        path = self.path / "random.safetensors"
        tensors = read_tensors(path)
        with errors_of(path):
            set_rng_state_(tensors)


def save(
    folder: str | os.PathLike[str],
    compressor: Savable,
    state: dict[str, Any],
    keep: int = KEPT,
    spare: Collection[int] = (),
) -> None:
    """Add a checkpoint to a folder, then remove all but the newest `keep`.

    Those of the steps in `spare` are kept too. UserError if the checkpoint cannot be written, or
    could not be loaded, or holds a value that is not finite; then the older ones stay as they were.
    """
    folder = Path(folder)
    path = folder / name_of(compressor.steps)
    aside = path.with_name(path.name + ".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove(aside)
        aside.mkdir()
        _write(aside, compressor, state)
        if path.exists():
            rename(path, path.with_name(path.name + REPLACED))
        rename(aside, path)
    except (OSError, UserError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"checkpoint {str(path)!r} cannot be written: {reason}") from None
    with contextlib.suppress(OSError):  # an old checkpoint that stays does no harm
        remove_older(folder, compressor.steps, keep, spare)


def _write(folder: Path, compressor: Savable, state: dict[str, Any]) -> None:
    check_rebuildable(compressor.model)  # as at the start: a structure() may not follow a cut
    parts: dict[str, Iterable[bytes | memoryview]] = {
        "structure.json": [_json(described_alone(compressor.model))],
        "model.safetensors": encoded(named_tensors(compressor.model)),
        "optimizer.safetensors": encoded(compressor.state_tensors()),
        "random.safetensors": encoded(rng_state()),
        "state.json": [_json({**state, "steps": compressor.steps})],
    }
    digests = {name: write_new(folder / name, parts[name]) for name in _PARTS}
    write_manifest(folder, compressor.steps, digests)
    sync(folder)


def _json(data: Any) -> bytes:
    try:
        return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()
    except ValueError:
        raise UserError("its state holds a value that is not a finite number") from None


def find(folder: Path | str) -> Checkpoint | None:
    """Return the newest intact checkpoint of a run or of a folder, or the folder itself.

    Logs a warning for each damaged one that is newer. None if there is no checkpoint; UserError if
    all are damaged.
    """
    damage = []
    for path in newest_first(Path(folder)):
        try:
            found = _opened(path)
        except UserError as error:
            damage.append(str(error))
            continue
        for message in damage:
            _log.warning("warning: %s; going back to %r", message, str(path))
        return found
    if damage:
        raise UserError(f"{damage[0]}; there is no intact checkpoint to go back to")
    return None


def last(folder: Path | str) -> Checkpoint | None:
    """Return the checkpoint that a finished run ended with; of anything else as `find` does.

    UserError if the run lost it: an older one holds another model than the summary describes.
    """
    ended = _ended(Path(folder))
    if ended is None:
        return find(folder)
    try:
        return _opened(next(path for path in newest_first(Path(folder)) if step_of(path) == ended))
    except (UserError, StopIteration) as error:
        reason = str(error) or "it holds no checkpoint of that step"
        raise UserError(
            f"{str(folder)!r} ended at step {ended}, and its final model is lost: {reason}; the "
            "command that began it trains the last steps again with --resume"
        ) from None


def _ended(folder: Path) -> int | None:
    """The step at which the run in this folder ended; None if it is not a finished run."""
    path = folder / "summary.json"
    if exists(folder / MANIFEST) or not exists(path):
        return None
    data = read_json(path, finite=False)
    steps = data.get("steps") if isinstance(data, dict) else None
    return steps if type(steps) is int else None


def put_aside_newer(found: Checkpoint) -> None:
    """Rename the damaged checkpoints that are newer than this one.

    Otherwise they would count among the newest few, and intact ones would be removed.
    """
    every = newest_first(found.path.parent)
    with contextlib.suppress(OSError):  # then they keep their names, as before
        for path in filter(_is_damaged, every[: every.index(found.path)]):
            aside = path.with_name(path.name + DAMAGED)
            remove(aside)
            os.replace(path, aside)


def _is_damaged(path: Path) -> bool:
    try:
        _opened(path)
    except UserError:
        return True
    return False


def at_step(folder: Path, step: int) -> Checkpoint:
    """Return the checkpoint of one step; UserError if it is missing or damaged."""
    return _opened(folder / name_of(step))


def _opened(path: Path) -> Checkpoint:
    step = check_manifest(path, _PARTS)
    if step_of(path) not in (-1, step):
        raise UserError(f"{str(path / MANIFEST)!r}: damaged, it is of step {step}")
    return Checkpoint(path, step)


def required(folder: Path | str) -> Checkpoint:
    """As `last`; UserError if there is no checkpoint."""
    found = last(folder)
    if found is None:
        raise UserError(f"{str(folder)!r} holds no checkpoint")
    return found


def load_structure(path: Path | str) -> Structure:
    """Read the structure of a run, of a checkpoint, or of a JSON file (alone or as a key)."""
    path = Path(path)
    return required(path).structure() if is_folder(path) else Structure.read(path)


def load_spec(path: Path | str) -> TransformerSpec:
    """Read the structure of a transformer, as `load_structure` does."""
    return load_structure(path).spec()


def load_model(folder: Path | str, device: str = "cpu") -> Compressible:
    """Rebuild the network of a run folder, or of a checkpoint folder, with its weights.

    Of a finished run, that of its last step; UserError if it is damaged. Else the newest that is
    intact. Returns a `Transformer`, or a `Compressible` of the class that was saved. That class is
    imported from where it was, with a line in the log, but never from the run folder itself.
    """
    return required(folder).model(device)


def load_state(folder: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the state of training and the optimizer's tensors."""
    return required(folder).state()
