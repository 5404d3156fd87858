"""Helpers of the kernels over flat storage.

The length of the storage changes with every drop, so no kernel specialises on it. Then Triton
cannot prove that a mask is equal for adjacent elements, and each thread accesses single elements.
Accesses are coalesced only if adjacent elements go to adjacent threads. Triton does that unless it
assumes aligned pointers, so no kernel specialises on alignment either.
"""

import triton
import triton.language as tl

# Elements of a program; reductions have block sizes of their own.
BLOCK = 1024


def blocks(size: int) -> tuple[int]:
    return (triton.cdiv(size, BLOCK),)


@triton.jit
def lerp(start, end, share):
    """(1 - share) start + share end, exactly `end` at 1: the two formulas of torch.lerp."""
    difference = end - start
    return tl.where(share < 0.5, start + share * difference, end - (1 - share) * difference)
