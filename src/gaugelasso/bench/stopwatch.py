"""How long device work takes, in ms: warm repetitions of several actions, taken in turns.

Another program that is busy for a while then slows down all that are compared, not one of them.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Action = Callable[[], Any]

# Seconds of repetitions of an action, and the fewest whatever they take.
PATIENCE = 10.0
FEWEST = 3


def in_turns(
    actions: Mapping[str, Action],
    device: str,
    repeats: int,
    warm: int = 5,
    before: Callable[[str], Any] = lambda name: None,
) -> dict[str, list[float]]:
    """Times of every action's calls, one call of each in every round.

    First come `warm` calls of each that do not count. Either ends when `PATIENCE` seconds per
    action are spent, but not before one call and `FEWEST`. Ahead of every call, outside of what
    is timed, `before` is told the action's name.
    """
    for name in actions:
        _rounds({name: actions[name]}, device, warm, 1, before)
    return _rounds(actions, device, repeats, FEWEST, before)


def _rounds(
    actions: Mapping[str, Action],
    device: str,
    most: int,
    fewest: int,
    before: Callable[[str], Any],
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in actions}
    spent, patience = 0.0, 1000 * PATIENCE * len(actions)
    for number in range(max(most, fewest)):
        if number >= fewest and spent >= patience:
            break
        for name, action in actions.items():
            before(name)
            times[name].append(_timed(action, device))
            spent += times[name][-1]
    return times


def _timed(action: Action, device: str) -> float:
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    if cuda:
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began)


def median_ms(action: Action, device: str, repeats: int, warm: int = 5) -> float:
    """Median time of one call, alone."""
    return statistics.median(in_turns({"": action}, device, repeats, warm)[""])


def quartiles(times: Sequence[float]) -> list[float]:
    """The lower and the upper: half of the times lie between."""
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return [low, high]


def matrix_rate(device: str, repeats: int = 10) -> float:
    """TFLOP/s of one large matrix product: bfloat16 on a GPU, float32 on a CPU."""
    cuda = device.startswith("cuda")
    size = 8192 if cuda else 1024
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    return 2 * size**3 / (median_ms(lambda: a @ a, device, repeats) * 1e9)
