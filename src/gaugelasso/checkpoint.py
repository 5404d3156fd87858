"""Checkpoints: tensors as safetensors, structure as JSON, no pickle.

    structure.json         the spec from which the network is built
    model.safetensors      every parameter and buffer
    optimizer.safetensors  optimizer state and the compressor's scalars
    state.json             where training stood

A folder is written aside and renamed, so the previous one stays until the new one
is whole.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gaugelasso.axes import Compressible, named_tensors
from gaugelasso.compressor import Compressor
from gaugelasso.errors import UserError
from gaugelasso.models import SpecError, Transformer, TransformerSpec
from gaugelasso.runs import read_json, write_json


def save(folder: Path, compressor: Compressor, state: dict[str, Any]) -> None:
    """Write the whole state, replacing what the folder held."""
    aside = folder.with_name(folder.name + ".tmp")
    previous = folder.with_name(folder.name + ".old")
    for leftover in (aside, previous):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir(parents=True)
    write_json(aside / "structure.json", compressor.structure)
    save_file(_plain(named_tensors(compressor.model)), aside / "model.safetensors")
    save_file(_plain(compressor.state_tensors()), aside / "optimizer.safetensors")
    write_json(aside / "state.json", {**state, "steps": compressor.steps})
    if folder.exists():
        os.replace(folder, previous)
    os.replace(aside, folder)
    shutil.rmtree(previous, ignore_errors=True)


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # Views of flat storage become tensors of their own.
    return {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}


def find(folder: Path) -> Path | None:
    """The checkpoint here, or its predecessor where a crash fell between two renames."""
    for candidate in (folder, folder.with_name(folder.name + ".old")):
        if (candidate / "state.json").exists():
            return candidate
    return None


def _found(folder: Path) -> Path:
    found = find(folder)
    if found is None:
        raise UserError(f"{str(folder)!r} holds no checkpoint")
    return found


def load_spec(path: Path | str) -> TransformerSpec:
    """The structure in a run folder, a checkpoint folder, or a JSON file (alone or as a key)."""
    path = Path(path)
    if path.is_dir():
        path = (find(path / "checkpoint") or _found(path)) / "structure.json"
    data = read_json(path)
    try:
        return TransformerSpec.from_dict(
            data.get("structure", data) if isinstance(data, dict) else data
        )
    except SpecError as error:
        raise UserError(f"{str(path)!r}: {error}") from None


def load_model(folder: Path | str, device: str = "cpu") -> Transformer:
    """Rebuild the network of a run folder, or of a checkpoint folder, with its weights."""
    folder = Path(folder)
    folder = find(folder / "checkpoint") or _found(folder)
    model = Transformer(load_spec(folder))
    fill_(model, _read(folder / "model.safetensors"), folder / "model.safetensors")
    return model.to(device)


def load_state(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Where training stood, and the optimizer's tensors."""
    folder = _found(folder)
    return read_json(folder / "state.json"), _read(folder / "optimizer.safetensors")


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
                    f"{str(path)!r}: tensor {name!r} is {_said(new)}, the structure wants "
                    f"{_said(tensor)}"
                )
            if not tensor.is_floating_point() and not torch.equal(new, tensor.cpu()):
                raise UserError(f"{str(path)!r}: {name!r} names other sites than the structure")
            tensor.copy_(new)


def _said(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"{str(path)!r}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{str(path)!r}: not a readable safetensors file ({error})") from None
