"""The settings of RoPE whose frequencies a model has: its structure keeps the frequencies alone.

Tried in turn: plain, scaled by `linear`, scaled by `llama3`.
"""

import math
from collections.abc import Iterator, Sequence

from gaugelasso.importing.rope import Bands, Rope

# The largest relative difference of two frequencies that are equal: both were rounded to float32.
_ROUNDING = 1e-6
# Shares of the high frequencies that differ from 0 and 1 by no more than rounding.
_EDGE = 1e-5
# Bands of frequencies are for a context of pretraining. They are the same for every context if
# their limits grow with it; this is the one of Llama 3.
CONTEXT = 8192
_ANY_BASE = 10_000.0


def fitted(frequencies: Sequence[float]) -> Rope | None:
    """The settings that have these frequencies; None if there are none.

    Short numbers are preferred: the base and the factors of a config are written with few digits.
    """
    pairs = len(frequencies)
    for digits in (5, 17):
        for rope in _candidates(frequencies, digits):
            if (
                rope.theta >= 1
                and rope.factor >= 1
                and _equal(rope.frequencies(pairs), frequencies)
            ):
                return rope
    return None


def _candidates(frequencies: Sequence[float], digits: int) -> Iterator[Rope]:
    pairs, first, last = len(frequencies), frequencies[0], frequencies[-1]
    if not (math.isfinite(first) and first >= last > 0):
        return
    factor = _short(1 / first, digits)
    if pairs == 1:  # theta^0, whatever theta is
        yield Rope(_ANY_BASE, factor)
        return
    yield Rope(_short((first / last) ** (pairs / (pairs - 1)), digits), factor)
    # Llama 3 keeps high frequencies; any of them gives the base, later ones more exactly.
    for high in range(1, pairs - 1):
        if 0 < frequencies[high] < 1:
            theta = _short(frequencies[high] ** (-pairs / high), digits)
            yield from _scaled(frequencies, theta, digits)


def _scaled(frequencies: Sequence[float], theta: float, digits: int) -> Iterator[Rope]:
    """Scaled by `llama3`, with this base."""
    pairs = len(frequencies)
    plain = [theta ** (-p / pairs) for p in range(pairs)]
    factor = _short(plain[-1] / frequencies[-1], digits)
    if factor <= 1 + _ROUNDING:
        return
    shares = [
        (f / p - 1 / factor) / (1 - 1 / factor) for f, p in zip(frequencies, plain, strict=True)
    ]
    turns = [CONTEXT * p / (2 * math.pi) for p in plain]
    line = list(zip(turns, shares, strict=True))
    highs = [point for point in line if point[1] >= 1 - _EDGE]
    lows = [point for point in line if point[1] <= _EDGE]
    between = [point for point in line if _EDGE < point[1] < 1 - _EDGE]
    if not highs or not lows:
        return
    # The share is linear in the turns. With fewer than two points, the steepest line that keeps
    # the pairs beside them where they are.
    at, share = between[-1] if between else lows[0]
    if len(between) > 1:
        slope = (between[0][1] - share) / (between[0][0] - at)
    else:
        rises = [(highs[-1], 1.0), (lows[0], 0.0)]
        slope = max((to - share) / (turn - at) for (turn, _), to in rises if turn != at)
    low, high = at - share / slope, at + (1 - share) / slope
    if 0 <= low < high:
        bands = Bands(_short(low, digits), _short(high, digits), float(CONTEXT))
        yield Rope(theta, factor, bands)


def _short(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(math.isclose(a, b, rel_tol=_ROUNDING) for a, b in pairs)
