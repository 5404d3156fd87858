"""The order to prune in: every index by its utility per unit of price, least first.

The utility is the calibrated one of the penalty, which needs no pressure to be measured. Decides
only; `ModelState.cut_` cuts.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gaugelasso.compress.drop import Decision
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.penalty import ranked
from gaugelasso.compress.ranking import DropPlanner


@contextmanager
def balanced(state: ModelState) -> Iterator[None]:
    """Within the context all axes are balanced; after it every value is what it was, to the bit.

    Utilities of different axes compare at balance. But training goes on in the gauge that the
    model was trained in: on balanced weights small models ended worse (docs/development/log.md).
    """
    if not state.balances:
        yield
        return
    undo = state.snapshot_values()
    state.balance_(pressing=False)
    try:
        yield
    finally:
        undo()


class EfficiencyRanking(DropPlanner):
    """The indices of a model by efficiency. Drops are made from the front of the order.

    Each index goes alone, and the number of drops is exact; `compress.ranking.Ranking` lets units
    of indices go together, and finds a number that is near.
    Three kinds of indices stay: the strongest of an axis that does not silence its owner, as in a
    structural event; the strongest of each axis of an operator that may not be removed; and those
    whose drop, after all drops before it, would remove such an operator by the cascade.
    """

    def __init__(self, state: ModelState):
        super().__init__(state)
        utility, table = state.utility(), state.table
        kept = {
            (axis.name, int(utility[axis.name].argmax()))
            for axis in table.axes
            if len(utility[axis.name]) and (not axis.silences or axis.owner in table.required)
        }
        self._order = [
            (name, index)
            for share, name, index in ranked(utility, state.prices)
            if math.isfinite(share) and (name, index) not in kept
        ]
        self._places = self._places_of(self._order)
        self._most = self._most_from(0)

    def _places_of(self, order: Sequence[tuple[str, int]]) -> dict[str, Tensor]:
        """Axis name -> the place of each index in the order; the last one for those that stay."""
        places = {
            name: torch.full((size,), len(order)) for name, size in self._state.widths().items()
        }
        for place, (name, index) in enumerate(order):
            places[name][index] = place
        return places

    def _most_from(self, number: int) -> int:
        """How many drops are possible, of which `number` are known to be."""
        # More drops do not bring back a required operator, so this is a bisection.
        every = range(number, len(self._order) + 1)
        return number + bisect_left(every, True, key=lambda n: self.decision(n) is None) - 1

    def _leave_out_(self) -> bool:
        """Let the first index stay that cannot go; False if all that are left can."""
        if self._most == len(self._order):
            return False
        self._leave_out_at_(self._most)
        return True

    def _leave_out_at_(self, place: int) -> None:
        """Let the index at this place of the order stay; all before it can go."""
        del self._order[place]
        self._places = self._places_of(self._order)
        self._most = self._most_from(place)

    def decision(self, number: int) -> Decision | None:
        """What the first `number` drops lead to; None if a required operator would go."""
        return self.closed({name: places >= number for name, places in self._places.items()})

    def work(self, number: int) -> float:
        """Work per token after the first `number` drops."""
        return self.work_of(self.decision(number))

    @property
    def least_work(self) -> float:
        """The work per token after all drops that are possible."""
        return self.work(self._number_to(-math.inf))

    def to_work(self, target: float, least: float = 0.0) -> Decision:
        """The fewest drops that bring the work to `target`, or all that are possible.

        A drop that leads below `least` takes an operator along, and is left out, unless the target
        is not reached without it.
        """
        number = self._number_to(target)
        fewest = self._made(number)
        while number and self.work(number) < least:
            self._leave_out_at_(number - 1)
            number = self._number_to(target)
        return self._made(number) if self.work(number) <= target else fewest

    def next(self, channels: int) -> Decision:
        """The first `channels` drops; more where multiples of widths let fewer have no effect."""
        lower = math.nextafter(self._state.fma, -math.inf)
        return self._made(min(max(channels, self._number_to(lower)), self._most))

    def _number_to(self, target: float) -> int:
        while self.work(self._most) > target and self._leave_out_():
            pass
        every = range(self._most + 1)
        return min(bisect_left(every, True, key=lambda n: self.work(n) <= target), self._most)

    def _made(self, number: int) -> Decision:
        decision = self.decision(number)
        assert decision is not None  # `number` is at most `_most`
        return decision
