"""The key/value cache: static tensors that prefill and decoding fill in place.

Widths differ between layers, so the cache has another shape in every layer. A token's keys and
values stand at its position, for sequences of any length in one batch: what lies beyond a
sequence's own position is never read.
"""

from functools import cached_property
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from gaugelasso.memory import check_fits
from gaugelasso.models import SpecError

# Keys [G, L, d_k] and values [G, L, d_v] of one sequence, as arrays.
Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]
# Tokens of a channel that begin at an aligned address.
VECTOR = 16


class NewTokens(NamedTuple):
    """Where one new token of every sequence stands.

    `positions` [B] on the device, and `seen` keys of the cache that contain all of them. `equal` is
    the position of all, where the host knows that they have the same. `mask` [B, 1, 1, seen] says
    what each of them sees, where that is needed: neither with equal positions nor by kernels.
    """

    positions: Tensor
    seen: int
    equal: int | None = None
    mask: Tensor | None = None


class CacheRows(NamedTuple):
    """Where the new keys and values of one operator go: its part of a cache, and the sequences.

    Keys [B, G, L, d_k] and values [B, G, L, d_v]; `slots` are the sequences (default: in order).
    """

    keys: Tensor
    values: Tensor
    slots: Tensor | None = None

    def store_(self, k: Tensor, v: Tensor) -> None:
        """k [B, G, S, d_k] and v [B, G, S, d_v] from position 0 on."""
        where = slice(None, len(k)) if self.slots is None else self.slots
        for rows, new in ((self.keys, k), (self.values, v)):
            rows[where, :, : new.shape[2]] = new

    def store_one_(self, k: Tensor, v: Tensor, at: NewTokens) -> None:
        """k [B, G, d_k] and v [B, G, d_v] of one token of every sequence."""
        for rows, new in ((self.keys, k), (self.values, v)):
            if at.equal is None:
                rows[torch.arange(len(new), device=new.device), :, at.positions] = new
            else:
                rows.select(2, at.equal).copy_(new)


class Cache:
    """Keys [B, G, L, d_k] and values [B, G, L, d_v] of every attention operator, in their order.

    `positions` [B] is the number of tokens that each sequence holds, on the device. `longest` is
    an upper bound of them that the host knows, so that a step reads no more than it must. With
    `even` the host knows that all of them are `longest`. Who changes positions keeps all three.
    """

    def __init__(
        self,
        widths: list[tuple[int, int, int]],
        batch: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        by_channel: bool | None = None,
    ):
        """`widths` holds (G, d_k, d_v) of every attention operator.

        `by_channel` (default: on a GPU) makes the tokens of a channel contiguous, with room for a
        multiple of `VECTOR` of them. So a kernel reads odd widths in whole vectors.
        """
        by_channel = device.type == "cuda" if by_channel is None else by_channel
        room = -(-length // VECTOR) * VECTOR
        each = sum(groups * (d_k + d_v) for groups, d_k, d_v in widths) * dtype.itemsize
        what = f"a cache of {length:,} tokens"
        check_fits(each * (room if by_channel else length), batch, what, device)

        def rows(groups: int, width: int) -> Tensor:
            inner = (width, room) if by_channel else (length, width)
            made = torch.zeros(batch, groups, *inner, dtype=dtype, device=device)
            return made.transpose(2, 3) if by_channel else made

        self.keys = [rows(groups, d_k) for groups, d_k, _ in widths]
        self.values = [rows(groups, d_v) for groups, _, d_v in widths]
        self.positions = torch.zeros(batch, dtype=torch.long, device=device)
        self.batch, self.length = batch, length
        self.longest = 0
        self.even = True

    @cached_property
    def arrays(self) -> list[Pair]:
        """Keys and values of the first sequence, on the same memory; on a CPU."""
        both = zip(self.keys, self.values, strict=True)
        return [(keys[0].numpy(), values[0].numpy()) for keys, values in both]

    @property
    def bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(each.numel() * each.element_size() for each in [*self.keys, *self.values])

    def hold_(self, tokens: int) -> None:
        """Let all sequences hold this many tokens, whatever stands there."""
        self.positions.fill_(tokens)
        self.longest, self.even = tokens, True

    def new_tokens(self, *, static: bool = False, kernels: bool = False) -> NewTokens:
        """The places of the next token of every sequence.

        With `static`, nothing depends on what the host knows. Kernels need no mask.
        """
        seen = self.length if static else self.longest + 1
        equal = self.longest if self.even and not static else None
        mask = None
        if equal is None and not kernels:
            places = torch.arange(seen, device=self.positions.device)
            mask = (places <= self.positions[:, None])[:, None, None]
        return NewTokens(self.positions, seen, equal, mask)

    def check_room(self, length: int) -> None:
        """SpecError if this many tokens of a sequence do not fit."""
        if length > self.length:
            raise SpecError(
                f"position {length} is beyond the cache's length of {self.length}; shorten the "
                "text, or make a longer cache"
            )

    def rows(self, index: int, rows: Tensor | slice | None = None) -> CacheRows:
        """The part of one operator, for all sequences or some of them."""
        keys, values = self.keys[index], self.values[index]
        if isinstance(rows, slice):
            return CacheRows(keys[rows], values[rows])
        return CacheRows(keys, values, rows)
