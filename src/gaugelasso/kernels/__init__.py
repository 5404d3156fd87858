"""The few operations a step is made of: each a plain reference, and a fused form for GPUs.

A function here says what is computed, in plain PyTorch; on a GPU with Triton the same
is done by a kernel of the same name in `gpu/`. There also are the fused forms of what
follows the backward pass, which is said plainly in `pace`, `optim`, `penalty` and `gauge`.
They get tensors and numbers; from which axes, tasks or phases these come they are not told.
"""

from gaugelasso.kernels.dispatch import NO_TARGET, reference_kernels
from gaugelasso.kernels.entropy import cross_entropy
from gaugelasso.kernels.heads import attend, merge_heads, split_heads
from gaugelasso.kernels.maps import deliver, project
from gaugelasso.kernels.stream import embed, read, write
from gaugelasso.kernels.swiglu import swiglu

__all__ = [
    "NO_TARGET",
    "attend",
    "cross_entropy",
    "deliver",
    "embed",
    "merge_heads",
    "project",
    "read",
    "reference_kernels",
    "split_heads",
    "swiglu",
    "write",
]
