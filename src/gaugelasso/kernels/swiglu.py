"""SwiGLU: the gated product between the two maps of an MLP."""

import torch.nn.functional as F
from torch import Tensor

from gaugelasso.kernels.dispatch import fused


def swiglu(both: Tensor) -> Tensor:
    """up silu(gate), with up the first half of the rows and gate the second: [2 f, N] -> [f, N]."""
    if fused(both):
        from gaugelasso.kernels.gpu.pointwise import Swiglu

        return Swiglu.apply(both)
    up, gate = both.chunk(2)
    return up * F.silu(gate)
