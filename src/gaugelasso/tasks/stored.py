"""What tasks over stored data share.

Where it lies, how it is known again, the order of an epoch, the way to a device.
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

# Hashing all of it would be minutes for a hundred gigabytes, at every start. So larger data are
# known by their length and by this many bytes, in pieces spread evenly from the first to the last:
# other data show, and so does a part that was cut off or shifted; a byte changed here or there
# need not.
_LOOKED_AT, _PIECES = 2**26, 2**10


def known(data: np.ndarray) -> dict[str, Any]:
    """What data are known by: their bytes, and a SHA-256 of all or, if they are many, of some."""
    flat = data.reshape(-1).view(np.uint8)
    digest = hashlib.sha256(repr((data.shape, data.dtype.str)).encode())
    if flat.size <= _LOOKED_AT:
        digest.update(flat.data)
    else:
        length = _LOOKED_AT // _PIECES
        for piece in range(_PIECES):
            start = piece * (flat.size - length) // (_PIECES - 1)
            digest.update(flat[start : start + length].data)
    return {"bytes": flat.size, "sha256": digest.hexdigest()}


def place(path: str, key: str) -> Path:
    """What the user calls `path`, with `~` for a home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{key} = {path!r}: nobody of this name has a home here; write the path in full"
        ) from None


def seen_from(path: Path) -> str:
    """For an error: where a relative path was looked for, which is not where the config lies."""
    return "" if path.is_absolute() else f" in {str(Path.cwd())!r}"


def cache_folder(told: str = "") -> Path:
    """The folder told by task.cache, or by GAUGELASSO_CACHE, or the system's for such things."""
    if told:
        return place(told, "task.cache")
    if told := os.environ.get("GAUGELASSO_CACHE", ""):
        return place(told, "GAUGELASSO_CACHE")
    return place(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME") / "gaugelasso"


def shuffled(
    places: np.ndarray, count: int, run: int, most: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Which of `count` items stands at each place, and the offset, at most `most`, of its epoch.

    Places are counted through all epochs. An epoch shows every item once, and depends on
    the run's seed and its own number alone: no place needs a memory of those before.
    """
    items, offsets = np.empty_like(places), np.empty_like(places)
    for epoch in np.unique(places // count):
        offset, order = _epoch(run, int(epoch), count, most)
        here = places // count == epoch
        items[here], offsets[here] = order[places[here] % count], offset
    return items, offsets


# A batch may lie in two epochs, and the next one is made ahead.
@functools.lru_cache(maxsize=2)
def _epoch(run: int, epoch: int, count: int, most: int) -> tuple[int, np.ndarray]:
    generator = np.random.default_rng([run, epoch])
    offset = int(generator.integers(most + 1)) if most else 0
    return offset, generator.permutation(count)


def to_device(rows: np.ndarray, device: str) -> Tensor:
    """Bytes travel as they are, and become numbers where they arrive."""
    tensor = torch.from_numpy(np.ascontiguousarray(rows))
    if device.startswith("cuda"):
        # Pinned, so that nobody waits for the copy.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
