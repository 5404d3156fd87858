"""The budget: of what may go, no more goes than a work target asks for.

Channels that nobody misses now are room to learn in once nothing presses on them any more.
"""

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from gaugelasso.drop import Decision

Settle = Callable[[dict[str, Tensor]], Decision | None]


def no_further(
    settle: Settle,
    keeps: dict[str, Tensor],
    work: Callable[[Decision], float],
    target: float,
    order: Callable[[], list[tuple[str, int]]],
) -> Decision | None:
    """What `settle` makes of the keep-sets, or of as few of their drops as bring work to `target`.

    `order` is asked only where all of them lead below it: every index, the first to go first.
    """
    whole = settle(keeps)
    if whole is None or work(whole) >= target:
        return whole
    drops = [(name, index) for name, index in order() if not keeps[name][index]]

    def first(number: int) -> Decision:
        some = {name: torch.ones_like(keep) for name, keep in keeps.items()}
        for name, index in drops[:number]:
            some[name][index] = False
        decision = settle(some)
        assert decision is not None  # for even all drops leave a network
        return decision

    # Not searched to the end where widths are rounded and work does not fall with every drop,
    # but what is found has been looked at, or is all of them.
    return first(bisect_left(range(len(drops)), True, key=lambda n: work(first(n)) <= target))
