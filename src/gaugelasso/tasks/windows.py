"""Windows of a long sequence of bytes or tokens, for tasks that predict the next one.

Training goes through the sequence in epochs. An epoch contains every adjacent window of `length`
once, in a random order and from a random offset. Order and offset depend on the run's seed and the
epoch alone, so a batch can be drawn without those before it.

The held-out sequence is split by position: the first half is for selection, the second half for
the test, with an unused window between them. Halves, rather than alternating windows, because
adjacent windows continue each other. Held-out batches are the windows of a half in order.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.errors import UserError
from gaugelasso.tasks.protocol import SELECTION, TEST, TRAINING, Draw, Predict
from gaugelasso.tasks.stored import shuffled, to_device

Array = np.ndarray[Any, np.dtype[Any]]

# Windows that selection and test need at least, and windows between them.
_LEAST_WINDOWS, _GAP = 2, 1


def check_long_enough(train: Array, valid: Array, length: int, unit: str,
                      origins: tuple[str, str], *, split: float,
                      window: int | None = None) -> None:  # fmt: skip
    """UserError unless both have enough windows; `unit` is what they are sequences of.

    `length` is task.length, and `window` what a window has of the sequence, if that is less.
    `split` is the share of the sequence that `valid` is, if it is one.
    """
    window = length if window is None else window
    windows = 2 * _LEAST_WINDOWS + _GAP
    halves = f" ({_LEAST_WINDOWS} windows for selection and {_LEAST_WINDOWS} for the test)"
    for name, origin, part, least, why, change in (
        ("training", origins[0], train, window + 1, "", "lower"),
        ("validation", origins[1], valid, windows * window + 1, halves, "raise"),
    ):
        if len(part) < least:
            raise UserError(
                f"the {name} text of {origin!r} has {len(part):,} {unit}; "
                f"task.length = {length} needs at least {least:,}{why}: give more text, "
                f"{f'{change} task.split, ' if split else ''}or lower task.length"
            )


def part_of(train: Array, valid: Array, stream: int, length: int, after: int = 1) -> Array:
    """What a stream reads; no two streams share an element.

    `after` is how many elements after a window its targets need.
    """
    selection_windows = ((len(valid) - 1) // length - _GAP) // 2
    selection = valid[: selection_windows * length + after]
    test = valid[(selection_windows + _GAP) * length :]
    return {TRAINING: train, SELECTION: selection, TEST: test}[stream]


def drawn(part: Array, size: int, draw: Draw, length: int) -> Array:
    """The windows of a batch, each with its last target: [size, length + 1]."""
    positions = draw.index * size + np.arange(size)
    if draw.held_out:
        # Starts again from the first window after the last.
        starts = length * (positions % ((len(part) - 1) // length))
    else:
        starts = _training_starts(positions, draw.run, len(part), length)
    return part[starts[:, None] + np.arange(length + 1)]


def _training_starts(positions: np.ndarray, run: int, size: int, length: int) -> np.ndarray:
    """First elements of the windows at these positions, which count through all epochs."""
    # One window fewer than would fit leaves room for the epoch's offset.
    count = max(1, size // length - 1)
    max_offset = size - 1 - count * length
    windows, offsets = shuffled(positions, count, run, max_offset)
    return offsets + length * windows


def split_targets(rows: Array, device: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets, which are the inputs one position later."""
    # Not every device computes with unsigned numbers other than bytes.
    tensor = to_device(rows if rows.dtype == np.uint8 else rows.astype(np.int32), device).long()
    return tensor[:, :-1].contiguous(), tensor[:, 1:].contiguous()


def total_loss(
    part: Array,
    length: int,
    at_once: int,
    predict: Predict,
    loss: Callable[[Tensor, Tensor], Tensor],
    device: str,
) -> Tensor:
    """The sum of the losses of a sequence, `at_once` windows at a time, in float64.

    Every element but the first is predicted once, from those before it in its window.
    """
    total = torch.zeros((), device=device, dtype=torch.float64)
    windows = math.ceil((len(part) - 1) / length)
    for first in range(0, windows, at_once):
        rows = np.arange(first, min(first + at_once, windows))
        at = length * rows[:, None] + np.arange(length + 1)
        # The last window may extend past the end; positions there are masked.
        inputs, targets = split_targets(part[np.minimum(at, len(part) - 1)], device)
        past_end = torch.from_numpy(at[:, 1:] >= len(part)).to(device)
        counted = (~past_end).sum()
        mean = loss(predict(inputs), targets.masked_fill(past_end, kernels.NO_TARGET))
        total += mean.double() * counted
    return total
