"""Gauge factors: how the factor c of a balance or an anchor is bounded and rounded.

Shared by the functions that run and by their references. Knows nothing of axes or storage.
"""

import torch
from torch import Tensor

# One sweep changes a side by at most this factor.
CLIP = 8.0
# The smallest positive denominator.
TINY = 1e-38


def power_of_two(x: Tensor) -> Tensor:
    """The power of two that is nearest to x > 0 by ratio.

    Multiplying by it changes exponents only, so a network computes the same values as before in
    any precision. Any other factor rounds every weight, which is a small random change at each
    event. Networks that hold a tight loss in bfloat16 are sensitive to that.
    """
    mantissa, _ = torch.frexp(x)  # in [0.5, 1)
    return x / mantissa * torch.where(mantissa < 0.5**0.5, 0.5, 1.0)


def balance_factor(ratio: Tensor, clip: float, rounded: bool) -> Tensor:
    """c = sqrt(ratio) within [1/clip, clip], as a power of two if `rounded`."""
    factor = ratio.sqrt().clamp(1 / clip, clip)
    return power_of_two(factor) if rounded else factor


def anchor_factor(lift: Tensor, rounded: bool, least: float | Tensor) -> Tensor:
    """c = sqrt(max(lift, least)) of a gain whose normaliser's level changes by the factor `lift`.

    A lower level makes all weights smaller for the same function, so that steps become relatively
    larger. A large change at one event makes a network lose a loss that it held
    (docs/development/log.md).
    """
    factor = lift.clamp(min=least).sqrt()
    return power_of_two(factor) if rounded else factor
