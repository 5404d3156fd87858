"""Times device work in ms: several actions are repeated in turns, after warm-up calls.

Because of the turns, another program that is busy for a while slows down all actions that are
compared, and not only one.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Action = Callable[[], Any]

# Seconds of repetitions per action, and the number of repetitions that are always done.
MAX_SECONDS = 10.0
FEWEST = 3
# Rows and columns of the matrices that `matrix_rate` multiplies: enough to keep a device busy.
_SIZES = {"cuda": 8192, "cpu": 1024}


def in_turns(
    actions: Mapping[str, Action],
    device: str,
    repeats: int,
    warm: int = 5,
    before: Callable[[str], Any] = lambda name: None,
) -> dict[str, list[float]]:
    """Return the times of every action's calls; each round calls every action once.

    Before that, each action has `warm` calls that do not count. Warm-up and measurement end early
    after `MAX_SECONDS` seconds per action, but not before one warm-up call and `FEWEST` measured
    calls. `before` is called with the action's name ahead of every call and is not timed.
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
    spent_ms, limit_ms = 0.0, 1000 * MAX_SECONDS * len(actions)
    for number in range(max(most, fewest)):
        if number >= fewest and spent_ms >= limit_ms:
            break
        for name, action in actions.items():
            before(name)
            times[name].append(_timed(action, device))
            spent_ms += times[name][-1]
    return times


def _timed(action: Action, device: str) -> float:
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if cuda:
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def median_ms(action: Action, device: str, repeats: int, warm: int = 5) -> float:
    """Return the median time of one call."""
    return statistics.median(in_turns({"": action}, device, repeats, warm)[""])


def quartiles(times: Sequence[float]) -> list[float]:
    """Return the lower and the upper quartile."""
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return [low, high]


def matrix_rate(device: str, repeats: int = 10) -> float:
    """Return the TFLOP/s of one large matrix product: bfloat16 on a GPU, float32 on a CPU."""
    cuda = device.startswith("cuda")
    size = _SIZES["cuda" if cuda else "cpu"]
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    return 2 * size**3 / (median_ms(lambda: a @ a, device, repeats) * 1e9)
