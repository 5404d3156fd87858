"""Options that follow from a model and the length of a run."""

import math
import statistics
from dataclasses import asdict, fields

from torch import nn

from gaugelasso.axes import Compressible
from gaugelasso.compress.options import CompressorOptions, RunOptions

# The learning rate is RATE over the side of a typical weight matrix, between these bounds. That is
# within a factor of 1.6 of the rates that were found by trial (docs/development/log.md).
RATE, LEAST_LR, MOST_LR = 0.2, 1e-4, 3e-3
# For pretrained weights a share of that rate, and no more than this: what they know is lost at once
# and learned again slowly.
PRETRAINED_RATE, MOST_PRETRAINED_LR = 0.5, 2e-4
# A run has about so many structural events, at most one in this many steps.
EVENTS, LEAST_INTERVAL, MOST_INTERVAL = 100, 10, 100


def matrix_sizes(model: nn.Module) -> list[int]:
    """The numbers of elements of a model's weight matrices."""
    return [parameter.numel() for parameter in model.parameters() if parameter.ndim >= 2]


def default_lr(sizes: list[int], pretrained: bool = False) -> float:
    """The learning rate for weight matrices of these numbers of elements."""
    side = math.sqrt(statistics.median(sizes)) if sizes else 1.0
    rate = min(max(RATE / max(side, 1.0), LEAST_LR), MOST_LR)
    return min(PRETRAINED_RATE * rate, MOST_PRETRAINED_LR) if pretrained else rate


def default_interval(steps: int) -> int:
    """The number of steps from one structural event to the next."""
    return min(max(steps // EVENTS, LEAST_INTERVAL), MOST_INTERVAL)


def chosen_options(options: CompressorOptions, model: Compressible, steps: int) -> RunOptions:
    """The options of a run of this length, 0 if it is not known; what is given stays.

    Channels of pretrained weights go by their harm, unless they are to be exchanged.
    """
    pretrained = model.is_pretrained
    given = {each.name: getattr(options, each.name) for each in fields(options)}
    chosen = asdict(RunOptions())
    if steps:
        chosen["lr"] = default_lr(matrix_sizes(model), pretrained)
        chosen["interval"] = default_interval(steps)
        if pretrained and not options.exchange:
            chosen["removal"] = "harm"
    return RunOptions(**{k: chosen[k] if value is None else value for k, value in given.items()})
