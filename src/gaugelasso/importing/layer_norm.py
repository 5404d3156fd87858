"""A LayerNorm over the stream, written as the transformer's normalisers: without mean and bias.

    LayerNorm(x) = gain (x - mean x) / sqrt(eps + var x) + bias

What is written to the stream is centred over the sites, so that the mean of the stream is zero and
its variance is its mean square. That changes no output, because every LayerNorm removes the mean.
Each map that reads a LayerNorm takes over its bias: W^T (n + b) = W^T n + W^T b.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gaugelasso.models import centred
from gaugelasso.models.layers import Injector


@dataclass(frozen=True)
class LayerNorm:
    """Gain and bias [D], in float64."""

    gain: Tensor
    bias: Tensor

    def bias_after(self, maps: Tensor, bias: Tensor | None = None) -> Tensor:
        """The bias of a map [D, c] that reads the normalised stream without `self.bias`."""
        moved = self.bias @ maps
        return moved if bias is None else moved + bias


@torch.no_grad()
def write_centred_(parameter: nn.Parameter, values: Tensor) -> None:
    """Fill a table or map into the stream, [..., D] as `values`, so that it writes mean zero."""
    parameter.copy_(centred(values).view(parameter.shape))


@torch.no_grad()
def write_bias_(write: Injector, values: Tensor) -> None:
    assert write.bias is not None
    write.bias.copy_(centred(values))
