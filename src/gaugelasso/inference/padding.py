"""Sequences of unequal length in one tensor: padded on the right inside, on either side outside."""

from typing import Literal

import torch
from torch import Tensor

Side = Literal["left", "right"]


def rolled(values: Tensor, lengths: Tensor, direction: int) -> Tensor:
    """[B, S, ...] padded on the left -> padded on the right (direction 1), or the reverse (-1)."""
    size = values.shape[1]
    index = torch.arange(size, device=values.device) + direction * (size - lengths[:, None])
    index = (index % size).view(*index.shape, *[1] * (values.ndim - 2)).expand(values.shape)
    return values.gather(1, index)
