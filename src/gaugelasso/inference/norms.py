"""A LayerNorm in place at inference: over the stream of a post-norm model, or over hidden channels.

Activations are token-major, [N, channels]. Plain PyTorch on every device.
"""

import torch
from torch import Tensor, nn

from gaugelasso.inference.folding import Folding
from gaugelasso.inference.stream import placed, statistics_dtype
from gaugelasso.kernels.stream import EPS
from gaugelasso.models.centred_norm import CentredNorm


class Norm(nn.Module):
    """gain c / sqrt(eps + weight . c^2) + bias, with c = x - spread (mean . x); 0 without signal.

    `mean` and `spread` stay apart from `weight`, because training moves all three.
    """

    mean: Tensor
    spread: Tensor
    weight: Tensor
    gain: Tensor
    bias: Tensor

    def __init__(self, part: CentredNorm, folding: Folding, places: Tensor | None = None):
        """`places` are those of its channels in the stream; without them, channels are padded."""
        super().__init__()
        self.eps = part.eps
        number = len(part.mean)
        at = torch.arange(number) if places is None else places
        width = folding.wide(number) if places is None else folding.size
        for name in ("mean", "spread", "weight", "gain", "bias"):
            values = placed(getattr(part, name).detach().cpu(), at, width)
            self.register_buffer(name, values.to(statistics_dtype(folding.dtype)))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.mean.dtype)
        centred = wide - (wide @ self.mean)[:, None] * self.spread
        level = centred.square() @ self.weight + self.eps
        factor = torch.where(level > EPS, level.clamp(min=EPS).rsqrt(), 0.0)
        return (centred * factor[:, None] * self.gain + self.bias).to(x.dtype)
