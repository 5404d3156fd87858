"""The budget: what may go goes one after the other, until a work target is met.

Channels that nobody misses now are room to learn in once nothing presses on them any more.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Keeps = dict[str, Tensor]


def no_further(
    keeps: Keeps,
    work: Callable[[Keeps], float],
    target: float,
    order: Callable[[], Iterable[tuple[str, int]]],
) -> Keeps:
    """The shortest run of drops that brings work to `target`; all of them if none does.

    `work` is what is left to do after keep-sets are carried out, and never more for another
    drop. `order` is asked only where a choice has to be made: every index, first to go first.
    """
    if all(bool(keep.all()) for keep in keeps.values()) or work(keeps) >= target:
        return keeps
    drops = [(name, index) for name, index in order() if not keeps[name][index]]

    def first(number: int) -> Keeps:
        some = {name: torch.ones_like(keep) for name, keep in keeps.items()}
        for name, index in drops[:number]:
            some[name][index] = False
        return some

    return first(bisect_left(range(len(drops)), True, key=lambda n: work(first(n)) <= target))
