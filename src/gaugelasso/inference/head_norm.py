"""The norms of queries and keys at inference, folded from those of a trained attention."""

import torch
from torch import Tensor, nn

from gaugelasso.inference.stream import statistics_dtype
from gaugelasso.kernels.stream import EPS


class HeadNorm(nn.Module):
    """gain_c z_c / sqrt(eps + sum_c weight_c z_c^2) in each head; 0 without signal.

    Gains and weights are [2, width]: those of all query heads, and those of all key heads. The
    softmax scale is in the gains of the queries. Plain PyTorch on any device.
    """

    gain: Tensor
    weight: Tensor

    def __init__(
        self, gain: Tensor, weight: Tensor, heads: int, groups: int, eps: float, dtype: torch.dtype
    ):
        super().__init__()
        self.heads, self.groups, self.eps = heads, groups, eps
        precise = statistics_dtype(dtype)
        self.register_buffer("gain", gain.detach().cpu().to(precise))
        self.register_buffer("weight", weight.detach().cpu().to(precise))

    def forward(self, rows: Tensor) -> Tensor:
        """[N, features], which begin with heads of queries and keys -> these normalised."""
        count = self.heads + self.groups
        size = count * self.gain.shape[1]
        heads = rows[:, :size].unflatten(1, (count, -1)).to(self.gain.dtype)
        level = (heads.square() * self._spread(self.weight)).sum(2, keepdim=True) + self.eps
        factor = torch.where(level > EPS, level.clamp(min=EPS).rsqrt(), 0.0)
        normal = heads * factor * self._spread(self.gain)
        return torch.cat([normal.flatten(1).to(rows.dtype), rows[:, size:]], dim=1)

    def _spread(self, values: Tensor) -> Tensor:
        """[2, width] -> [heads + groups, width]."""
        kinds = values[0].expand(self.heads, -1), values[1].expand(self.groups, -1)
        return torch.cat(kinds)
