"""Copies the tensors of a file into a model; what does not belong to its structure is refused."""

from pathlib import Path

import torch
from torch import Tensor

from gaugelasso.axes import Compressible, named_tensors
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer


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
                    f"the structure needs {_shape_and_dtype(tensor)}"
                )
            indices = isinstance(model, Transformer) and not tensor.is_floating_point()
            if indices and not torch.equal(new, tensor.cpu()):
                raise UserError(f"{str(path)!r}: {name!r} names other sites than the structure")
            tensor.copy_(new)


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
