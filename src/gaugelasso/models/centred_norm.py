"""A LayerNorm in place: over the whole residual stream (post-norm), or over hidden channels.

Activations are feature-major, [features, tokens].
"""

import torch
from torch import Tensor, nn

from gaugelasso.axes import Axis, Cost, Norm, Operation, Slot
from gaugelasso.kernels.stream import EPS
from gaugelasso.models.layers import STREAM, Part, size


class CentredNorm(nn.Module):
    """y_j = gain_j c_j / sqrt(eps + sum_i weight_i c_i^2) + bias_j, with the centred c.

        c_j = x_j - spread_j sum_i mean_i x_i

    Initially mean = spread = D^(-1/2) and weight = 1/D: the usual LayerNorm. `mean` reads every
    channel and `spread` writes to it, so both are parameters, on the two sides of the axis. A
    channel that is zero on side A is then zero before and after, and can be cut: a plain mean would
    write to it for ever, and would change with the number of channels. The weights of the
    squares are a buffer. A fading channel leaves the level as what is written to it fades.
    """

    weight: Tensor
    energy: Tensor

    def __init__(self, width: int, *, eps: float, by_token: bool):
        super().__init__()
        self.eps, self.by_token = eps, by_token
        self.mean = nn.Parameter(torch.full((width,), width**-0.5))
        self.spread = nn.Parameter(torch.full((width,), width**-0.5))
        self.gain = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("weight", torch.full((width,), 1 / width))
        self.register_buffer("energy", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[width, N] -> [width, N]."""
        # Statistics in half precision would lose the small channels.
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        mean = (self.mean[:, None] * wide).sum(0)
        centred = wide - self.spread[:, None] * mean
        square = centred.square()
        level = (self.weight[:, None] * square).sum(0) + self.eps
        # No gradient for tokens without signal: a product of several 1 / sqrt(EPS) overflows.
        factor = torch.where(level > EPS, level.clamp(min=EPS).rsqrt(), 0.0)
        if self.training:
            counted = square.detach()
            if self.by_token:
                counted = counted * factor.detach().square()
            self.energy.copy_(counted.mean(1))
        y = self.gain[:, None] * (centred * factor) + self.bias[:, None]
        return y.to(x.dtype)

    # --- the axis of its channels; `name` is the module's name in the model -------------

    def writes(self, name: str, stage: int | None = None) -> tuple[Slot, ...]:
        """Its slots on side A: what it adds to a channel."""
        return tuple(Slot(f"{name}.{leaf}", stage=stage) for leaf in ("spread", "bias"))

    def reads(self, name: str, stage: int | None = None) -> tuple[Slot, ...]:
        """Its slot on side B."""
        return (Slot(f"{name}.mean", stage=stage),)

    def riders(self, name: str, gauge: bool) -> tuple[Slot, ...]:
        """The gain is between a channel and itself, so no rescale of the channel changes it."""
        powers = {"gain": 0, "weight": -2, "energy": 2}
        return tuple(
            Slot(f"{name}.{leaf}", power=power if gauge else 0) for leaf, power in powers.items()
        )

    def norm(self, name: str) -> Norm:
        names = f"{name}.gain", f"{name}.weight", f"{name}.energy"
        return Norm(*names, has_eps=self.eps > 0, by_token=self.by_token, follows=False)

    @staticmethod
    def costs(axis: str) -> list[Cost]:
        """The mean, the centring and the gain."""
        return [Cost("scale", 3, (axis,))]


class StreamNorm(Part):
    """A `CentredNorm` over all sites. No operator owns it, so it is there as long as its sites."""

    def __init__(self, width: int, *, eps: float, by_token: bool):
        super().__init__()
        self.norm = CentredNorm(width, eps=eps, by_token=by_token)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def axes(self, name: str) -> list[Axis]:
        return []

    def matrices(self, name: str) -> dict[str, int]:
        return {}

    def norms(self, name: str) -> list[Norm]:
        return [self.norm.norm(f"{name}.norm")]

    def costs(self, name: str) -> list[Cost]:
        return CentredNorm.costs(STREAM)

    def operations(self, name: str) -> list[Operation]:
        return [Operation("norm", (size(STREAM),))]
