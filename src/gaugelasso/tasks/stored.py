"""Helpers for tasks over stored data.

Paths and the cache folder, fingerprints of data, the order of an epoch, copies to a device.
"""

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaugelasso.errors import UserError

# Hashing a hundred gigabytes at every start would take minutes. So the fingerprint of larger data
# is their length and a hash of this many bytes, in pieces spread evenly from the first byte to the
# last. It detects other data and data that were truncated or shifted, but not every changed byte.
_HASHED_BYTES, _PIECES = 2**26, 2**10


def fingerprint(data: np.ndarray) -> dict[str, Any]:
    """Number of bytes, and SHA-256 of all of them or, for large data, of a sample."""
    flat = data.reshape(-1).view(np.uint8)
    digest = hashlib.sha256(repr((data.shape, data.dtype.str)).encode())
    if flat.size <= _HASHED_BYTES:
        digest.update(flat.data)
    else:
        length = _HASHED_BYTES // _PIECES
        for piece in range(_PIECES):
            start = piece * (flat.size - length) // (_PIECES - 1)
            digest.update(flat[start : start + length].data)
    return {"bytes": flat.size, "sha256": digest.hexdigest()}


def expand(path: str, key: str) -> Path:
    """The path, with `~` replaced by the home folder; `key` names the setting in an error."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{key} = {path!r}: there is no home folder for this user name; write the path in full"
        ) from None


def searched_in(path: Path) -> str:
    """For an error: the working directory, which relative paths start from (not the config's)."""
    return "" if path.is_absolute() else f" in {str(Path.cwd())!r}"


def cache_folder(path: str = "") -> Path:
    """`path` (task.cache) if given, else GAUGELASSO_CACHE, else the user's cache folder."""
    if path:
        return expand(path, "task.cache")
    if path := os.environ.get("GAUGELASSO_CACHE", ""):
        return expand(path, "GAUGELASSO_CACHE")
    return expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME") / "gaugelasso"


def shuffled(
    positions: np.ndarray, count: int, run: int, max_offset: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The item (of `count`) at each position, and the offset of its epoch, 0 to `max_offset`.

    Positions count through all epochs. An epoch contains every item once. Its order and offset
    depend on the run's seed and the epoch's number alone, so no earlier position is needed.
    """
    items, offsets = np.empty_like(positions), np.empty_like(positions)
    for epoch in np.unique(positions // count):
        offset, order = _epoch(run, int(epoch), count, max_offset)
        here = positions // count == epoch
        items[here], offsets[here] = order[positions[here] % count], offset
    return items, offsets


# Two, because a batch may span two epochs.
@functools.lru_cache(maxsize=2)
def _epoch(run: int, epoch: int, count: int, max_offset: int) -> tuple[int, np.ndarray]:
    generator = np.random.default_rng([run, epoch])
    offset = int(generator.integers(max_offset + 1)) if max_offset else 0
    return offset, generator.permutation(count)


def to_device(rows: np.ndarray, device: str) -> Tensor:
    """A copy on the device, in the dtype of the rows: bytes are cheaper to transfer than floats."""
    tensor = torch.from_numpy(np.ascontiguousarray(rows))
    if device.startswith("cuda"):
        # Pinned memory makes the copy asynchronous.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
