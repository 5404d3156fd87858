"""What kernels over flat storage share.

The storage's length changes with every cut and says nothing about the next one: no kernel
specialises on it.
"""

import triton
import triton.language as tl

# Elements of one program.
BLOCK = 1024


def blocks(size: int) -> tuple[int]:
    return (triton.cdiv(size, BLOCK),)


@triton.jit
def lerp(start, end, share):
    """(1 - share) start + share end, exactly `end` at 1: the two forms that PyTorch has."""
    way = end - start
    return tl.where(share < 0.5, start + share * way, end - (1 - share) * way)
