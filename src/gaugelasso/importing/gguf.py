"""Reads GGUF files of versions 2 and 3: metadata, shapes, and tensors as float32.

The file is mapped, not read. Every count and length is compared with the bytes that are left
before anything is made from it. Arrays of the metadata (the tokenizer) are stepped over, and read
when they are asked for.
"""

import math
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaugelasso.errors import UserError, first_line
from gaugelasso.files.untrusted import open_plain
from gaugelasso.importing.gguf_tokenizer import Array, tokenizer_files
from gaugelasso.importing.quantised import FORMATS, OTHERS, Format
from gaugelasso.importing.source import Settings, Source

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Far more than any model has; each entry takes more memory than bytes of the file.
_MOST_ENTRIES = 2**16
_LONGEST_NAME = 2**12
_LONGEST_TEXT = 2**24
_MOST_STRINGS = 2**24
_MOST_DIMS = 4
_STRING, _ARRAY = 8, 9
# Type number of a value -> its format in `struct`.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """One tensor: its place in the file, its format, its shape with the longest stride first."""

    start: int
    format: Format
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) // self.format.elements * self.format.size


def open_gguf(path: Path) -> Source:
    """The model of a file; UserError names the file and what is wrong with it."""
    try:
        with open_plain(path) as file:
            data: np.ndarray = np.memmap(file, dtype=np.uint8, mode="r")
        metadata, tensors = parse(data)
    except FileNotFoundError:
        raise UserError(f"{str(path)!r}: no such file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r}: not a readable GGUF file ({first_line(error)})") from None
    settings = Settings(path, metadata)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise settings.error("general.architecture", "must be the name of an architecture")
    shapes = {name: stored.shape for name, stored in tensors.items()}

    def read(name: str) -> Tensor:
        tensor = decoded(data, tensors[name])
        if not tensor.isfinite().all():
            raise UserError(f"{str(path)!r}: {name!r} holds a value that is not a finite number")
        return tensor

    files = partial(tokenizer_files, settings, lambda array: values(data, array))
    return Source(path, architecture, settings, shapes, read, files)


def values(data: np.ndarray, array: Array) -> list:
    """The values of an array of the metadata, whose place `parse` has checked."""
    if array.kind == _STRING:
        reader = _Reader(data, array.start)
        return [reader.text() for _ in range(array.count)]
    kind = f"<{_SCALARS[array.kind]}"
    end = array.start + array.count * struct.calcsize(kind)
    return np.frombuffer(data[array.start : end].tobytes(), kind).tolist()


def decoded(data: np.ndarray, stored: Stored) -> Tensor:
    """The values of one tensor as float32."""
    raw = data[stored.start : stored.start + stored.size].reshape(-1, stored.format.size)
    # A block whose scale is infinite has values that are NaN; the caller refuses them.
    with np.errstate(invalid="ignore", over="ignore"):
        return torch.from_numpy(stored.format.decode(raw).reshape(stored.shape))


def parse(data: np.ndarray) -> tuple[dict[str, Any], dict[str, Stored]]:
    """The metadata and the tensors of a file; ValueError if it is damaged."""
    reader = _Reader(data)
    if reader.raw(len(_MAGIC)) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = reader.take("I")
    if version not in _VERSIONS:
        # A big-endian file has its version in the upper bytes.
        order = " (big-endian)" if version and version % 2**16 == 0 else ""
        raise ValueError(f"version {version}{order} is none of {_VERSIONS}")
    tensor_count, key_count = reader.entries("tensors"), reader.entries("keys")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = reader.text(_LONGEST_NAME)
        if key in metadata:
            raise ValueError(f"key {key[:60]!r} appears twice")
        metadata[key] = reader.value(reader.take("I"))
    return metadata, _tensors(reader, tensor_count, metadata.get("general.alignment", 32))


def _tensors(reader: "_Reader", count: int, alignment: Any) -> dict[str, Stored]:
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise ValueError(f"general.alignment = {alignment!r} is not a multiple of 8")
    found: dict[str, Stored] = {}
    for _ in range(count):
        name = reader.text(_LONGEST_NAME)
        if name in found:
            raise ValueError(f"tensor {name[:60]!r} appears twice")
        found[name] = _tensor(reader, name, alignment)
    begin = -(-reader.at // alignment) * alignment
    # Tensors that share bytes would need more memory than the file has.
    if sum(stored.size for stored in found.values()) > reader.end - begin:
        raise ValueError("it is too short for its tensors")
    for name, stored in found.items():
        if begin + stored.start + stored.size > reader.end:
            raise ValueError(f"tensor {name[:60]!r} ends after the end of the file")
    return {
        name: Stored(begin + stored.start, stored.format, stored.shape)
        for name, stored in found.items()
    }


def _tensor(reader: "_Reader", name: str, alignment: int) -> Stored:
    """One entry; its start counts from the first byte after all entries."""
    dims = reader.take("I")
    if not 1 <= dims <= _MOST_DIMS:
        raise ValueError(f"tensor {name[:60]!r} has {dims} dims")
    sizes = [reader.take("Q") for _ in range(dims)]
    kind, start = reader.take("I"), reader.take("Q")
    if kind not in FORMATS:
        known = ", ".join(form.name for form in FORMATS.values())
        raise ValueError(
            f"tensor {name[:60]!r} has the type {OTHERS.get(kind, kind)}; only {known} are imported"
        )
    form = FORMATS[kind]
    if not all(sizes) or sizes[0] % form.elements:
        raise ValueError(f"tensor {name[:60]!r}: {sizes} is no shape of the type {form.name}")
    if start % alignment:
        raise ValueError(f"tensor {name[:60]!r} is not aligned to {alignment} bytes")
    # The first size of a file is of the dim whose elements are adjacent.
    return Stored(start, form, tuple(reversed(sizes)))


class _Reader:
    """Takes values from a file in their order; ValueError where the file ends too soon."""

    def __init__(self, data: np.ndarray, at: int = 0):
        self._data, self.at, self.end = data, at, len(data)

    def skip(self, size: int) -> None:
        if size > self.end - self.at:
            raise ValueError("it ends inside its header")
        self.at += size

    def raw(self, size: int) -> bytes:
        self.skip(size)
        return self._data[self.at - size : self.at].tobytes()

    def take(self, kind: str) -> Any:
        [value] = struct.unpack(f"<{kind}", self.raw(struct.calcsize(f"<{kind}")))
        return value

    def entries(self, what: str) -> int:
        count: int = self.take("Q")
        if count > _MOST_ENTRIES:
            raise ValueError(f"{count:,} {what} are too many")
        return count

    def text(self, longest: int = _LONGEST_TEXT) -> str:
        length = self.take("Q")
        if length > longest:
            raise ValueError(f"a name or text of {length:,} bytes is too long")
        return self.raw(length).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"a value has the unknown type {kind}")
        return self.take(_SCALARS[kind])

    def _array(self) -> Array:
        kind, count = self.take("I"), self.take("Q")
        array = Array(kind, count, self.at)
        if kind in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[kind]}"))
        elif kind == _STRING and count <= _MOST_STRINGS:
            for _ in range(count):
                self.skip(self.take("Q"))
        else:
            raise ValueError(f"an array of {count:,} values of type {kind} is not read")
        return array
