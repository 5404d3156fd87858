"""A permutation test: do two methods differ, or could their seeds be exchanged?"""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

# A test is made if it can give a p value below this.
_LEVEL = 0.05
_EXACT, _DRAWS = 200_000, 100_000


def permutation_p(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Two-sided p of the difference of two means, by exchanging seeds between the two methods.

    Over all exchanges, up to 10 seeds against 10, or over random ones if these are more. None if
    even the clearest difference could not get below 0.05: 3 seeds against 3 cannot, 4 against 4
    can.
    """
    if not one or not other:
        return None
    values, size = np.array([*one, *other]), len(one)
    ways = math.comb(len(values), size)
    # Of equal numbers, an exchange of all seeds is as far apart.
    if (2 if len(one) == len(other) else 1) / ways >= _LEVEL:
        return None
    if exact := ways <= _EXACT:
        picks = np.array(list(combinations(range(len(values)), size)))
    else:
        random = np.random.default_rng(0)
        picks = random.random((_DRAWS, len(values))).argsort(1)[:, :size]
    sums = values[picks].sum(1)
    apart = np.abs(sums / size - (values.sum() - sums) / len(other))
    observed = abs(np.mean(one) - np.mean(other))
    extreme = int((apart >= observed - 1e-12 * np.abs(values).max()).sum())
    return extreme / ways if exact else (1 + extreme) / (1 + _DRAWS)
