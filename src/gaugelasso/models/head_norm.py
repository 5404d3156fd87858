"""The norm of queries or keys within each head, before RoPE.

Compression removes key indices: RoPE pairs, or single channels without RoPE. Each has one gain and
one slow weight, as a site of the stream has for a reader, so that every axis of keys is bilinear in
the gains of queries and keys, and an index can leave the norm before it is cut.
"""

import torch
from torch import Tensor, nn

from gaugelasso import kernels
from gaugelasso.axes import Norm, Slot


class HeadNorm(nn.Module):
    """gain_p c_sp z_sp / sqrt(eps + sum_p weight_p mean_s z_sp^2), s the two of a RoPE pair.

    Initially weight = 1 / P: RMSNorm of a head. The gains c of single channels (`channel`) are
    those of pretraining: they are trained, but not pressed. There are none without RoPE, where an
    index is a channel. `by_token` as in `Extractor`.
    """

    weight: Tensor
    energy: Tensor

    def __init__(self, shape: tuple[int, ...], *, eps: float, by_token: bool):
        """`shape` is (2, P) with RoPE, else (P,)."""
        super().__init__()
        self.eps, self.by_token = eps, by_token
        indices = shape[-1]
        self.gain = nn.Parameter(torch.ones(indices))
        self.channel = nn.Parameter(torch.ones(shape)) if len(shape) > 1 else None
        self.register_buffer("weight", torch.full((indices,), 1 / indices))
        self.register_buffer("energy", torch.ones(indices))

    @property
    def gains(self) -> Tensor:
        """Of all channels of a head, shaped as the head is."""
        return self.gain if self.channel is None else self.gain * self.channel

    @property
    def weights(self) -> Tensor:
        """Of the squares of all channels of a head: each of a pair has half of its slow weight."""
        return self.weight if self.channel is None else (self.weight / 2).expand(2, -1)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [H * d_k, N] of the heads -> the same, normalised."""
        energy = self.energy if self.training else None
        norm = self.gains, self.weight, energy, self.eps, self.by_token
        return kernels.normalise_heads(rows, *norm)

    # --- the axis table; `name` is the module's name in the model ----------------------

    def norm(self, name: str) -> Norm:
        names = f"{name}.gain", f"{name}.weight", f"{name}.energy"
        return Norm(*names, has_eps=self.eps > 0, by_token=self.by_token)

    def riders(self, name: str) -> tuple[Slot, ...]:
        """What goes with an index, beside its gain."""
        slow = Slot(f"{name}.weight"), Slot(f"{name}.energy")
        return slow if self.channel is None else (*slow, Slot(f"{name}.channel", 1))

    def fixed(self, name: str) -> list[Slot]:
        return [] if self.channel is None else [Slot(f"{name}.channel", 0)]
