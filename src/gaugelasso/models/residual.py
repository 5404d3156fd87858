"""Reads and writes of a removable residual stream, for models of your own: [..., sites].

`SlowNorm` reads sites of the stream and `SiteWriter` adds to them, each by a map of
positions, so that layers may have different widths. Both return their part of the axis table;
`stream_axis` puts the parts together. Plain PyTorch: the built-in transformer has fused forms of
its own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gaugelasso.axes import Axis, Norm, Slot

# Tokens with a smaller mean square have no signal to normalise.
EPS = 1e-20


def centred(weight: Tensor, dim: int = -1) -> Tensor:
    """The weight minus its mean along a dim: what a map writes then has mean zero over sites."""
    return weight - weight.mean(dim, keepdim=True)


class SlowNorm(nn.Module):
    """y_j = gain_j x[s_j] / sqrt(sum_i w_i x[s_i]^2), with slow weights w.

    Initially w = 1/D: the usual RMSNorm. The weights follow the gain slowly, so that a fading
    site leaves the normaliser smoothly, and a site that is zero can be cut. For pretrained weights
    give `by_token`: tokens that are far larger than others then count no more than these.

    This is also how a LayerNorm over a removable stream is written. Where every map writes values
    of mean zero over the sites (`centred`), the stream has mean zero, and `nn.LayerNorm` without
    bias equals RMSNorm. Its bias is not needed, because the bias of the map that reads y can do
    the same. So every network with LayerNorm is one with SlowNorm. The reverse does not hold: once
    sites are gone, a mean over all of them would couple each to all others.
    """

    sites: Tensor
    weight: Tensor
    energy: Tensor

    def __init__(self, sites: Sequence[int], *, by_token: bool = False):
        super().__init__()
        number, self.by_token = len(sites), by_token
        self.gain = nn.Parameter(torch.ones(number))
        self.register_buffer("sites", torch.tensor(sites, dtype=torch.long))
        self.register_buffer("weight", torch.full((number,), 1 / max(number, 1)))
        self.register_buffer("energy", torch.ones(number))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., d], for the d sites that are read."""
        picked = x.index_select(-1, self.sites)
        square = picked.square()
        level = (square @ self.weight).unsqueeze(-1)
        factor = torch.where(level > EPS, level.clamp(min=EPS).rsqrt(), 0.0)
        if self.training:  # what the slow weights follow
            counted = square.detach()
            if self.by_token:
                counted = counted * factor.detach().square()
            self.energy.copy_(counted.flatten(0, -2).mean(0))
        return self.gain * picked * factor

    # --- the axis table; `name` is the module's name in the model ----------------------

    def axis(
        self, name: str, maps: tuple[Slot, ...], owner: str | None = None, silences: bool = True
    ) -> Axis:
        """The inputs of the maps that read y: side A is the gain, side B their rows."""
        leaves = ("sites", "weight", "energy")
        riders = tuple(Slot(f"{name}.{leaf}") for leaf in leaves)
        sides = (Slot(f"{name}.gain"),), maps
        return Axis(
            f"{name}.in", "in", *sides, riders, owner, silences=silences, growth="permutation"
        )

    def norm(self, name: str) -> Norm:
        names = f"{name}.gain", f"{name}.weight", f"{name}.energy"
        return Norm(*names, by_token=self.by_token)

    def reads(self, name: str, stage: int) -> tuple[Slot, tuple[Slot, ...]]:
        """Its slot on side B of the stream, and the stream's riders."""
        link = f"{name}.sites"
        powers = {"weight": -2, "energy": 2}
        riders = (Slot(f"{name}.{leaf}", link=link, power=powers[leaf]) for leaf in powers)
        return Slot(f"{name}.gain", link=link, stage=stage), tuple(riders)


class SiteWriter(nn.Module):
    """x[t_j] + scale_j u_j: adds the outputs u of a map to sites of the stream."""

    sites: Tensor

    def __init__(self, sites: Sequence[int]):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(len(sites)))
        self.register_buffer("sites", torch.tensor(sites, dtype=torch.long))

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        return x.index_add(-1, self.sites, self.scale * u)

    def axis(self, name: str, maps: tuple[Slot, ...], owner: str | None = None) -> Axis:
        """The outputs: side A is the maps that compute u (and their bias), side B the scale."""
        scale, sites = Slot(f"{name}.scale"), Slot(f"{name}.sites")
        sides = maps, (scale,)
        return Axis(f"{name}.out", "out", *sides, (sites,), owner=owner, growth="permutation")

    def writes(self, name: str, stage: int) -> Slot:
        """Its slot on side A of the stream."""
        return Slot(f"{name}.scale", link=f"{name}.sites", stage=stage)


def stream_axis(
    name: str,
    width: Slot,
    writers: Sequence[Slot],
    readers: Sequence[tuple[Slot, tuple[Slot, ...]]],
) -> Axis:
    """The axis of the stream, from `writes` and `reads`; `width` is a buffer with all sites."""
    riders = (width, *(rider for _, riders in readers for rider in riders))
    sides = tuple(writers), tuple(slot for slot, _ in readers)
    return Axis(name, name, *sides, riders, growth="permutation")
