"""The native form of a model on the disk: trained weights and structure, to serve from.

    structure.json     what the network is built from
    model.safetensors  every parameter, and the weights of the normalisers

Reading needs torch, numpy and safetensors, and nothing of training.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from gaugelasso.errors import UserError, errors_of, first_line
from gaugelasso.files.durable import write_new
from gaugelasso.files.tensors import encoded, read_tensors
from gaugelasso.files.untrusted import read_json
from gaugelasso.inference.model import InferenceModel
from gaugelasso.models import Transformer, TransformerSpec

STRUCTURE, WEIGHTS = "structure.json", "model.safetensors"


def save(model: Transformer, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write both files into a folder, weights in the given precision."""
    text = json.dumps(model.structure(), indent=1) + "\n"
    write_new(folder / STRUCTURE, [text.encode()])
    tensors = {name: tensor.to(dtype) for name, tensor in _weights(model).items()}
    write_new(folder / WEIGHTS, encoded(tensors))


def load(
    folder: Path | str, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> InferenceModel:
    """The inference form of a model that `gaugelasso export RUN --form native` has written.

    `dtype` is the precision to compute in. UserError names the file that is missing or damaged.
    """
    return InferenceModel(load_weights(folder).to(device), dtype=dtype)


def load_weights(folder: Path | str) -> Transformer:
    """The trained network of such a folder, for `tuned` or for an `InferenceModel` with options."""
    folder = Path(folder)
    path = folder / STRUCTURE
    try:
        data = read_json(path)
    # ValueError: no valid JSON. RecursionError: nested too deeply.
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{str(path)!r}: not a readable structure ({first_line(error)}); give a folder of "
            "gaugelasso export --form native"
        ) from None
    with errors_of(path):
        spec = TransformerSpec.from_dict(data)
    path = folder / WEIGHTS
    tensors = read_tensors(path)
    # Checked before the network is built: a damaged structure must not exhaust the memory.
    if sum(tensor.numel() for tensor in tensors.values()) < spec.weights:
        raise UserError(f"{str(path)!r}: too short, the structure needs {spec.weights:,} weights")
    model = Transformer(spec)
    here = _weights(model)
    for name in sorted(here.keys() ^ tensors.keys()):
        what = "is missing" if name in here else "is not in the structure"
        raise UserError(f"{str(path)!r}: tensor {name!r} {what}")
    for name, tensor in here.items():
        if tensor.shape != tensors[name].shape:
            raise UserError(
                f"{str(path)!r}: tensor {name!r} has shape {tuple(tensors[name].shape)}, the "
                f"structure needs {tuple(tensor.shape)}"
            )
        tensor.copy_(tensors[name])
    return model.eval()


def _weights(model: Transformer) -> dict[str, Tensor]:
    """What inference needs beyond the structure: no sites, frequencies or energies."""
    left_out = ("sites", "frequencies", "energy")
    return {
        name: tensor for name, tensor in model.state_dict().items() if not name.endswith(left_out)
    }
