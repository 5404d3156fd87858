"""The key/value cache: static tensors that prefill and decoding fill in place.

Widths differ between layers, so the cache has another shape in every layer. A token's keys and
values stand at its position, for sequences of any length in one batch: what lies beyond a
sequence's own position is never read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gaugelasso.models import SpecError

# Tokens of a channel that begin at an aligned address.
VECTOR = 16


class CacheRows(NamedTuple):
    """Where the new keys and values of one operator go: its part of a cache, and the sequences.

    Keys [B, G, L, d_k] and values [B, G, L, d_v]; `slots` are the sequences (default: in order).
    """

    keys: Tensor
    values: Tensor
    slots: Tensor | None = None

    def store_(self, k: Tensor, v: Tensor, at: Tensor | None) -> None:
        """k [B, G, S, d_k] and v [B, G, S, d_v] at the positions `at` [B, 1], or from 0 on."""
        for rows, new in ((self.keys, k), (self.values, v)):
            if at is None:
                where = slice(None, len(new)) if self.slots is None else self.slots
                rows[where, :, : new.shape[2]] = new
            else:  # one token of every sequence
                rows[torch.arange(len(new), device=new.device), :, at[:, 0]] = new[:, :, 0]


class Cache:
    """Keys [B, G, L, d_k] and values [B, G, L, d_v] of every attention operator, in their order.

    `positions` [B] is the number of tokens that each sequence holds, on the device. `longest` is
    an upper bound of them that the host knows, so that a step reads no more than it must.
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

        def rows(groups: int, width: int) -> Tensor:
            inner = (width, room) if by_channel else (length, width)
            made = torch.zeros(batch, groups, *inner, dtype=dtype, device=device)
            return made.transpose(2, 3) if by_channel else made

        self.keys = [rows(groups, d_k) for groups, d_k, _ in widths]
        self.values = [rows(groups, d_v) for groups, _, d_v in widths]
        self.positions = torch.zeros(batch, dtype=torch.long, device=device)
        self.batch, self.length = batch, length
        self.longest = 0

    @property
    def bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(each.numel() * each.element_size() for each in [*self.keys, *self.values])

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
