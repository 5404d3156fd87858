"""What kernels over flat storage share.

The storage's length changes with every cut and says nothing about the next one: no kernel
specialises on it. So no kernel knows that a mask is the same for neighbours, and each thread takes
its elements one by one. Neighbours must then go to neighbouring threads, which Triton sees to only
as long as it does not know that the vectors begin at a multiple of several elements: no kernel
specialises on that either.
"""

import triton
import triton.language as tl

# Elements that a program takes at a time; sums over many have numbers of their own.
BLOCK = 1024


def blocks(size: int) -> tuple[int]:
    return (triton.cdiv(size, BLOCK),)


@triton.jit
def lerp(start, end, share):
    """(1 - share) start + share end, exactly `end` at 1: the two forms that PyTorch has."""
    way = end - start
    return tl.where(share < 0.5, start + share * way, end - (1 - share) * way)
