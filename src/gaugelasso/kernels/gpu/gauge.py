"""Slow norm weights: one program for each normaliser, whose tensors are given by address."""

import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.gpu.flat import BLOCK, lerp


@triton.jit
def _follow(addresses, sizes, rate, tiny, BLOCK: tl.constexpr):
    norm, count = tl.program_id(0), tl.num_programs(0)
    weight = tl.load(addresses + norm).to(tl.pointer_type(tl.float32))
    gain = tl.load(addresses + count + norm).to(tl.pointer_type(tl.float32))
    energy = tl.load(addresses + 2 * count + norm).to(tl.pointer_type(tl.float32))
    size, share = tl.load(sizes + norm), tl.load(rate)
    squares = tl.zeros((BLOCK,), tl.float32)
    level = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        j = start + tl.arange(0, BLOCK)
        g = tl.load(gain + j, mask=j < size, other=0.0)
        e = tl.load(energy + j, mask=j < size, other=0.0)
        squares += g * g * e
        level += tl.load(weight + j, mask=j < size, other=0.0) * e
    total = tl.sum(squares)
    scale = tl.sum(level) / tl.maximum(total, tiny)
    if (share > 0) & (total > 0):
        for start in range(0, size, BLOCK):
            j = start + tl.arange(0, BLOCK)
            g = tl.load(gain + j, mask=j < size, other=0.0)
            w = tl.load(weight + j, mask=j < size, other=0.0)
            tl.store(weight + j, lerp(w, scale * (g * g), share), mask=j < size)


def follow_(addresses: Tensor, sizes: Tensor, rate: Tensor, tiny: float) -> None:
    """weight <- lerp(weight, gain^2 sum(weight energy) / sum(gain^2 energy), rate).

    addresses [3, normalisers]: of slow weights, gains and energies, all float32.
    """
    _follow[(len(sizes),)](addresses, sizes, rate, tiny, BLOCK)
