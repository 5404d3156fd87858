"""What tasks over stored data share: where it lies, the order of an epoch, the way to a device."""

import functools
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gaugelasso.errors import UserError


def place(path: str, key: str) -> Path:
    """What the user calls `path`, with `~` for a home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{key} = {path!r}: nobody of this name has a home here; write the path in full"
        ) from None


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
