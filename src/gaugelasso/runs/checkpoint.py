"""Checkpoints: tensors as safetensors, structure as JSON, a manifest over all, no pickle.

    step-00001000/
      structure.json         the spec from which the network is built
      model.safetensors      weights, riders and slow norm weights: every parameter and buffer
      optimizer.safetensors  momentum, second moments, rho and loss averages, rates, flags
      random.safetensors     torch's random number generators, of every device
      state.json             where training stood: step, phase, figures not yet logged, where
                             the run's logs ended
      manifest.json          length and SHA-256 of each, written last

A checkpoint is written aside, flushed to the disk and renamed. The newest few stay: one that
is damaged is passed over for the one before, with a warning, and put aside when the run goes on.

That is all the next step depends on. Batches are a function of (seed, step, stream), so the
step is the data's position, and no generator of theirs has a state; the schedule is a function
of the step and of when the structure froze. The history of events is the run's events.jsonl.
"""

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gaugelasso.axes import Compressible, named_tensors
from gaugelasso.errors import UserError, errors_of
from gaugelasso.files.durable import remove, rename, sync, write_new
from gaugelasso.files.tensors import encoded, read_tensors
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs.folder import CHECKPOINTS, read_json
from gaugelasso.runs.logs import Mark, is_marks
from gaugelasso.runs.manifest import NAME as MANIFEST
from gaugelasso.runs.manifest import check_manifest, write_manifest
from gaugelasso.runs.rng import rng_state, set_rng_state_

# In a run, `train.checkpoint_keep` says how many.
KEPT = 2
_PARTS = (
    "structure.json",
    "model.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "state.json",
)
# One that gives way to another of its step stays until that one has its name.
_REPLACED = ".replaced"
# Left for whoever wants to look at it; no checkpoint by its name.
_DAMAGED = ".damaged"
_NAME = re.compile(rf"step-(\d{{8,18}})({re.escape(_REPLACED)})?")
_log = logging.getLogger(__name__)


class Savable(Protocol):
    """What `save` asks for; a Compressor is one."""

    model: Compressible
    steps: int

    @property
    def structure(self) -> dict:
        """JSON from which the model can be built."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything beside the model that the next step depends on."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose files are, to the last bit, those that were written. Get one with `find`."""

    path: Path
    step: int

    def spec(self) -> TransformerSpec:
        return load_spec(self.path / "structure.json")

    def model(self, device: str = "cpu") -> Transformer:
        path, spec = self.path / "model.safetensors", self.spec()
        # Before it is built: a structure must not ask for more memory than its weights take.
        if 4 * spec.weights > path.stat().st_size:
            raise UserError(
                f"{str(path)!r}: too short, the structure wants {spec.weights:,} weights"
            )
        model = Transformer(spec)
        fill_(model, read_tensors(path), path)
        return model.to(device)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        state = self._state()
        state.pop("logs", None)
        return state, read_tensors(self.path / "optimizer.safetensors")

    def marks(self) -> dict[str, Mark]:
        """Of the run's logs, as they were then."""
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
        """Let torch's generators go on from where they were."""
        path = self.path / "random.safetensors"
        tensors = read_tensors(path)
        with errors_of(path):
            set_rng_state_(tensors)


def save(
    folder: Path,
    compressor: Savable,
    state: dict[str, Any],
    keep: int = KEPT,
    spare: Collection[int] = (),
) -> None:
    """Add a checkpoint to a folder of them, then let go of all but the newest `keep`.

    Those of the steps in `spare` stay too.

    UserError, with those before left as they were, if it cannot be written or holds a value
    that is not finite.
    """
    path = folder / _name(compressor.steps)
    aside = path.with_name(path.name + ".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove(aside)
        aside.mkdir()
        _write(aside, compressor, state)
        if path.exists():
            rename(path, path.with_name(path.name + _REPLACED))
        rename(aside, path)
    except (OSError, UserError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"checkpoint {str(path)!r} cannot be written: {reason}") from None
    with contextlib.suppress(OSError):  # what cannot be removed does no harm
        _let_go(folder, compressor.steps, keep, spare)


def _write(folder: Path, compressor: Savable, state: dict[str, Any]) -> None:
    parts: dict[str, Iterable[bytes | memoryview]] = {
        "structure.json": [_json(compressor.structure)],
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


def _let_go(folder: Path, newest: int, keep: int, spare: Collection[int]) -> None:
    """Remove what is older than the newest `keep`, and what a crash or another course left."""
    ring = [path for path in _ring(folder) if _step(path) <= newest]
    ring = [path for path in ring if not path.name.endswith(_REPLACED)]
    kept = ring[:keep] + [path for path in ring if _step(path) in spare]
    for path in folder.iterdir():
        if _NAME.fullmatch(path.name) and path not in kept:
            # Under another name first: what is half removed is not taken for a checkpoint.
            gone = path.with_name(path.name + ".tmp")
            remove(gone)
            os.replace(path, gone)
            remove(gone)
        elif _NAME.fullmatch(path.name.removesuffix(".tmp")) and path not in kept:
            remove(path)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step(path: Path) -> int:
    """The step in a checkpoint's name; -1 where the name has none."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _ring(folder: Path) -> list[Path]:
    """The checkpoints of a run or of a folder, the newest first, damaged ones too."""
    if (folder / MANIFEST).exists():
        return [folder]
    home = folder / CHECKPOINTS
    home = home if home.is_dir() else folder
    found = [path for path in home.iterdir() if _step(path) >= 0] if home.is_dir() else []
    # Of one step, the one that was to replace the other comes first.
    return sorted(found, key=lambda path: (-_step(path), path.name))


def find(folder: Path | str) -> Checkpoint | None:
    """The newest whole checkpoint of a run, of a folder of them, or the folder itself.

    Each that is damaged is told as a warning. None if there never was one; UserError if there
    was, but none is whole.
    """
    damage = []
    for path in _ring(Path(folder)):
        try:
            found = _opened(path)
        except UserError as error:
            damage.append(str(error))
            continue
        for said in damage:
            _log.warning("warning: %s; going back to %r", said, str(path))
        return found
    if damage:
        raise UserError(f"{damage[0]}; there is no whole checkpoint to go back to")
    return None


def put_aside_newer(found: Checkpoint) -> None:
    """Rename the damaged ones that were passed over for this one.

    Or they would count among the newest, and sound ones be let go of for them.
    """
    ring = _ring(found.path.parent)
    with contextlib.suppress(OSError):  # they are no worse than before
        for path in filter(_is_damaged, ring[: ring.index(found.path)]):
            aside = path.with_name(path.name + _DAMAGED)
            remove(aside)
            os.replace(path, aside)


def _is_damaged(path: Path) -> bool:
    try:
        _opened(path)
    except UserError:
        return True
    return False


def at_step(folder: Path, step: int) -> Checkpoint:
    """The checkpoint of one step; UserError if it is not there or damaged."""
    return _opened(folder / _name(step))


def _opened(path: Path) -> Checkpoint:
    step = check_manifest(path, _PARTS)
    if _step(path) not in (-1, step):
        raise UserError(f"{str(path / MANIFEST)!r}: damaged, it is of step {step}")
    return Checkpoint(path, step)


def _found(folder: Path | str) -> Checkpoint:
    found = find(folder)
    if found is None:
        raise UserError(f"{str(folder)!r} holds no checkpoint")
    return found


def load_spec(path: Path | str) -> TransformerSpec:
    """The structure in a run folder, a checkpoint folder, or a JSON file (alone or as a key)."""
    path = Path(path)
    if path.is_dir():
        return _found(path).spec()
    data = read_json(path)
    with errors_of(path):
        spec = TransformerSpec.from_dict(
            data.get("structure", data) if isinstance(data, dict) else data
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 4 * spec.weights > memory:
        raise UserError(
            f"{str(path)!r}: a structure of {spec.weights:.2g} weights, more than this machine "
            f"has memory for ({memory / 2**30:.0f} GiB)"
        )
    return spec


def load_model(folder: Path | str, device: str = "cpu") -> Transformer:
    """Rebuild the network of a run folder, or of a checkpoint folder, with its weights."""
    return _found(folder).model(device)


def load_state(folder: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Where training stood, and the optimizer's tensors."""
    return _found(folder).state()


def fill_(model: Compressible, tensors: dict[str, Tensor], path: Path) -> None:
    """Copy tensors into a model of the same structure; UserError where they do not match."""
    here = named_tensors(model)
    for name in here.keys() - tensors.keys():
        raise UserError(f"{str(path)!r}: tensor {name!r} of the structure is missing")
    for name in tensors.keys() - here.keys():
        raise UserError(f"{str(path)!r}: tensor {name!r} is not in the structure")
    with torch.no_grad():
        for name, tensor in here.items():
            new = tensors[name]
            if new.shape != tensor.shape or new.dtype != tensor.dtype:
                raise UserError(
                    f"{str(path)!r}: tensor {name!r} is {_shape_and_dtype(new)}, "
                    f"the structure wants {_shape_and_dtype(tensor)}"
                )
            if not tensor.is_floating_point() and not torch.equal(new, tensor.cpu()):
                raise UserError(f"{str(path)!r}: {name!r} names other sites than the structure")
            tensor.copy_(new)


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
