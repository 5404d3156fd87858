"""Sums over the rows and columns of many tensors in flat storage: three launches for all of them.

A slot is one dimension of one tensor, and has a sum for each index of it. Long sums are split into
chunks, whose sums are added in order, so that a result does not change from call to call.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

# Indices of a program, and elements of each that it adds at a time and in all. Of a last dimension
# adjacent indices are adjacent in memory, of any other one adjacent elements of an index.
_LAST = (64, 32, 512)
_OTHER = (8, 256, 4096)


@triton.jit
def _chunks(values, factors, slots, programs, partial, COLUMN: tl.constexpr,
            SQUARED: tl.constexpr, PRODUCT: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr,
            CHUNK: tl.constexpr):  # fmt: skip
    """Sums over one chunk of the elements of some indices."""
    program = programs + 3 * tl.program_id(0)
    slot = slots + 5 * tl.load(program)
    block, chunk = tl.load(program + 1), tl.load(program + 2)
    base, outer, size = tl.load(slot), tl.load(slot + 1), tl.load(slot + 2)
    inner, place = tl.load(slot + 3), tl.load(slot + 4)
    i = block * BI + tl.arange(0, BI)
    end = tl.minimum((chunk + 1) * CHUNK, outer * inner)
    total = tl.zeros((BI,), tl.float32)
    for start in range(chunk * CHUNK, end, BK):
        k = start + tl.arange(0, BK)
        if COLUMN:
            at = k[:, None] * size + i[None, :]
            mask = (k < end)[:, None] & (i < size)[None, :]
        else:
            at = (k // inner * size * inner + k % inner)[None, :] + (i * inner)[:, None]
            mask = (k < end)[None, :] & (i < size)[:, None]
        v = tl.load(values + base + at, mask=mask, other=0.0)
        if SQUARED:
            v = v * v
        elif PRODUCT:
            v = v * tl.load(factors + base + at, mask=mask, other=0.0)
        total += tl.sum(v, axis=0 if COLUMN else 1)
    tl.store(partial + place + chunk * size + i, total, mask=i < size)


@triton.jit
def _join(partial, sources, sizes, numbers, out, N, BLOCK: tl.constexpr):
    """The sum over the chunks of each index."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < N
    at = tl.load(sources + i, mask=live, other=0)
    size = tl.load(sizes + i, mask=live, other=0)
    number = tl.load(numbers + i, mask=live, other=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for chunk in range(tl.max(number)):
        there = live & (chunk < number)
        total += tl.load(partial + at + chunk * size, mask=there, other=0.0)
    tl.store(out + i, total, mask=live)


class RowSums:
    """The sums of some slots: (start of the tensor in flat storage, its shape, the dimension)."""

    def __init__(self, slots: Sequence[tuple[int, Sequence[int], int]], device: torch.device):
        described = np.zeros((len(slots), 5), np.int64)
        programs: dict[bool, list[np.ndarray]] = {True: [], False: []}
        sources, sizes, numbers = [], [], []
        place = 0
        for number, (start, shape, dim) in enumerate(slots):
            outer, size = int(np.prod(shape[:dim])), shape[dim]
            inner = int(np.prod(shape[dim + 1 :]))
            column = inner == 1 and outer > 1
            block, _, chunk = _LAST if column else _OTHER
            chunks, blocks = -(-outer * inner // chunk), -(-size // block)
            described[number] = start, outer, size, inner, place
            grid = np.stack(np.meshgrid([number], range(blocks), range(chunks)), -1)
            programs[column].append(grid.reshape(-1, 3))
            sources.append(place + np.arange(size))
            sizes.append(np.full(size, size))
            numbers.append(np.full(size, chunks))
            place += chunks * size
        self._partials, self._length = place, sum(map(len, sources))
        self._slots = torch.from_numpy(described).to(device)
        self._programs = {
            column: torch.from_numpy(np.concatenate(each).astype(np.int64)).to(device)
            for column, each in programs.items()
            if each
        }
        self._joined = [
            torch.from_numpy(np.concatenate(each).astype(np.int64)).to(device)
            for each in (sources, sizes, numbers)
            if each
        ]

    def __call__(self, values: Tensor, factors: Tensor | None = None) -> Tensor:
        """The sums of the values, or of their products with the factors, slot after slot.

        Values that are their own factors are read once.
        """
        partial, out = values.new_empty(self._partials), values.new_empty(self._length)
        if not self._length:
            return out
        for column, programs in self._programs.items():
            if len(programs):
                _chunks[(len(programs),)](
                    values, values if factors is None else factors, self._slots, programs,
                    partial, column, factors is values, factors is not None,
                    *(_LAST if column else _OTHER),
                )  # fmt: skip
        block = 128
        grid = (triton.cdiv(self._length, block),)
        _join[grid](partial, *self._joined, out, self._length, block)
        return out
