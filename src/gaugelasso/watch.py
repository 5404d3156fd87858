"""The watch: does a run hold its loss target, and is it beyond recovery?

Under pressure the loss swings around its target, and most excursions end by themselves. The
default of `train.patience` is longer than any that did under the conservative solver, in 40
runs of retrieval and two of ff31 at the paper's size (docs/log.md). Scalars only.
"""

# A mean loss above this multiple of the target is an excursion.
SLACK = 1.5
# How many times in a row a run goes back because of losses that are not numbers.
TRIES = 3


def off_target(loss: float, target: float) -> bool:
    return not loss <= target + (SLACK - 1) * abs(target)


def pressure(returns: int) -> float:
    """The share of pressure left after so many returns: what was too much is not tried again."""
    return 0.5**returns
