"""The operations of a training step: each as a reference in PyTorch and fused for GPUs.

A function here is the readable reference. On a GPU with Triton, a kernel of the same name in
`gpu/` computes the same. `gpu/` also holds the fused forms of what follows the backward pass;
their references are in `compress` (`step_scalars`, `optim`, `penalty`, `groups`, `gauge`). Kernels
take tensors and numbers, and depend on no axes, tasks or phases.
"""

from gaugelasso.kernels.dispatch import NO_TARGET, reference_kernels
from gaugelasso.kernels.entropy import cross_entropy, soft_cross_entropy
from gaugelasso.kernels.heads import attend, band, merge_heads, normalise_heads, split_heads
from gaugelasso.kernels.maps import (
    add_bias,
    deliver,
    join_rows,
    project,
    project_rows,
    split_rows,
)
from gaugelasso.kernels.stream import embed, read, write
from gaugelasso.kernels.swiglu import swiglu

__all__ = [
    "NO_TARGET",
    "add_bias",
    "attend",
    "band",
    "cross_entropy",
    "deliver",
    "embed",
    "join_rows",
    "merge_heads",
    "normalise_heads",
    "project",
    "project_rows",
    "read",
    "reference_kernels",
    "soft_cross_entropy",
    "split_heads",
    "split_rows",
    "swiglu",
    "write",
]
