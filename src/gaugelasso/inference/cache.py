"""The key/value cache: static tensors that prefill and decoding fill in place.

Widths differ between layers, so the cache has another shape in every layer. A token's keys and
values stand at its position, for sequences of any length in one batch: what lies beyond a
sequence's own position is never read.
"""

import torch
from torch import Tensor

from gaugelasso.models import SpecError


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
    ):
        """`widths` holds (G, d_k, d_v) of every attention operator."""

        def rows(groups: int, width: int) -> Tensor:
            return torch.zeros(batch, groups, length, width, dtype=dtype, device=device)

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

    def fill_(self, rows: Tensor | slice, index: int, k: Tensor, v: Tensor) -> None:
        """Store the first positions of some sequences, in one operator."""
        self.keys[index][rows, :, : k.shape[2]] = k
        self.values[index][rows, :, : v.shape[2]] = v

    def append_(self, index: int, k: Tensor, v: Tensor) -> None:
        """Store one token of every sequence at its position, in one operator."""
        rows = torch.arange(self.batch, device=self.positions.device)
        self.keys[index][rows, :, self.positions] = k[:, :, 0]
        self.values[index][rows, :, self.positions] = v[:, :, 0]
