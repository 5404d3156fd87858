"""Reads and writes safetensors files; writes one tensor after the other.

The library needs all tensors in host memory at once, which for a model on a GPU is a second copy.
The format is simple: the length of the header in eight bytes, a JSON header, the raw numbers.
The library does the reading: it checks the header and maps the numbers instead of copying them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gaugelasso.errors import UserError, errors_of
from gaugelasso.files.untrusted import parse_json

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8  # bytes


def encoded(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file; UserError if a value is not finite."""
    header: dict[str, dict] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for name, tensor in tensors.items():
        yield raw(name, tensor)


def raw(name: str, tensor: Tensor) -> memoryview:
    """The numbers of a tensor as bytes; UserError with its name if a value is not finite."""
    host = tensor.detach().cpu().contiguous()
    _check_finite(name, host)
    return host.reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return tensors by name, mapped from the file; UserError if one is damaged or not finite."""
    try:
        tensors = load_file(path)
        _check_names(path)
    except FileNotFoundError:
        raise UserError(f"{str(path)!r}: no such file") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{str(path)!r}: not a readable safetensors file ({error})") from None
    with errors_of(path):
        for name, tensor in tensors.items():
            _check_finite(name, tensor)
    return tensors


def _check_names(path: Path) -> None:
    """ValueError if a name appears twice: this library takes the last, others the first."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        parse_json(file.read(length))


def _check_finite(name: str, tensor: Tensor) -> None:
    if not tensor.isfinite().all():
        raise UserError(f"{name!r} holds a value that is not a finite number")
