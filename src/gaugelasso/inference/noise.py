"""Draws that depend on a sequence's seed and on the number of its tokens alone.

A counter-based generator: a hash of (seed, count, entry), so that all sequences of a batch are
drawn at once, in a captured graph, and each as if it were alone. The hash is SplitMix64, once for
the seed, once for the count and once for the entry. `torch.Generator` has a state instead; on a GPU
it would need one launch for each sequence.
"""

import torch
from torch import Tensor

from gaugelasso.kernels.dispatch import fused

# Constants of SplitMix64, as signed numbers: products of int64 wrap around, as those of uint64.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def exponential_(noise: Tensor, seeds: Tensor, counts: Tensor) -> None:
    """Fill noise [B, V] with exponential draws of the seeds [B] and the counts [B], both int64."""
    if fused(noise):
        from gaugelasso.kernels.gpu import decoding

        decoding.exponential_(noise, seeds, counts)
        return
    entries = torch.arange(1, noise.shape[1] + 1, device=noise.device)
    draw = _mix(_mix(seeds) + counts * _STEP)
    bits = _shift(_mix(draw[:, None] + entries * _STEP), 41)
    # With 23 bits a float32 holds the sum exactly, so that no uniform draw is 0 or 1.
    drawn = ((bits.float() + 0.5) * 2.0**-23).log().neg()
    noise.copy_(drawn.clamp(min=2.0**-24))  # its least value; a fast logarithm may give 0


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _FACTORS[0]
    z = (z ^ _shift(z, 27)) * _FACTORS[1]
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right, with zeros on the left: `>>` of a negative number has ones there."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
