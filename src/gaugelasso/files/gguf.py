"""Writes GGUF files of version 3: metadata and tensors that are not quantised.

The format: magic, version and counts, then keys with their values, then names, shapes, types and
offsets of the tensors, then their numbers. All is little-endian. `importing.gguf` reads it.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gaugelasso.files.tensors import raw

Value = bool | int | float | str | Sequence[str] | Sequence[int]

_MAGIC, _VERSION = b"GGUF", 3
# Bytes: readers expect this where the metadata does not name another.
_ALIGNMENT = 32
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


def encoded(
    metadata: Mapping[str, Value], tensors: Mapping[str, Tensor]
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file; UserError if a number of a tensor is not finite.

    Whole numbers are uint32, and int32 in a list.
    """
    header = [_MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        header += [_text(key), _value(value)]
    offset = 0
    for name, tensor in tensors.items():
        # The first size is of the dim whose elements are adjacent.
        sizes = struct.pack(f"<I{tensor.dim()}Q", tensor.dim(), *reversed(tensor.shape))
        header += [_text(name), sizes, struct.pack("<IQ", _TYPES[tensor.dtype], offset)]
        offset += _aligned(tensor.numel() * tensor.element_size())
    begin = b"".join(header)
    yield begin + bytes(_aligned(len(begin)) - len(begin))
    for name, tensor in tensors.items():
        numbers = raw(name, tensor)
        yield numbers
        yield bytes(_aligned(numbers.nbytes) - numbers.nbytes)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if isinstance(value, bool):  # before int, which it is too
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    whole = [each for each in value if isinstance(each, int)]
    kind = _INT32 if whole else _STRING
    body = (
        struct.pack(f"<{len(whole)}i", *whole) if whole else b"".join(map(_text, map(str, value)))
    )
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + body
