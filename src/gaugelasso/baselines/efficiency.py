"""The order to prune in: every index by its utility per unit of price, least first.

The utility is the calibrated one of the penalty, which needs no pressure to be measured. Decides
only; `ModelState.cut_` cuts.
"""

import math
from bisect import bisect_left

import torch

from gaugelasso.compress.drop import Decision, channel_rms, close_and_round
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.penalty import ranked


class Ranking:
    """The indices of a model as it is now. Drops are made from the front of the order.

    Two kinds of indices stay: the strongest of an axis that does not silence its owner, as in a
    structural event, and the strongest of each axis of an operator that may not be removed.
    """

    def __init__(self, state: ModelState):
        self._state, self._tensors = state, state.readable()
        self._rms = channel_rms(state.plan.penalty.groups, state.plan.store.weight)
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
        # The cascade may still remove a required operator. More drops do not bring it back.
        every = range(len(self._order) + 1)
        self._most = bisect_left(every, True, key=lambda n: self.decision(n) is None) - 1

    def decision(self, number: int) -> Decision | None:
        """What the first `number` drops lead to; None if a required operator would go."""
        state = self._state
        widths = state.widths()
        keeps = {name: torch.ones(size, dtype=torch.bool) for name, size in widths.items()}
        for name, index in self._order[:number]:
            keeps[name][index] = False
        multiples = state.options.multiple, state.plan.preferred
        return close_and_round(state.table, self._tensors, keeps, self._rms, *multiples)

    def work(self, number: int) -> float:
        """Work per token after the first `number` drops."""
        decision = self.decision(number)
        return -math.inf if decision is None else self._state.work_after(decision)

    @property
    def least_work(self) -> float:
        """The work per token after all drops that are possible."""
        return self.work(self._most)

    def to_work(self, target: float) -> Decision:
        """The fewest drops that bring the work to `target`, or all that are possible."""
        return self._made(self._number_to(target))

    def next(self, channels: int) -> Decision:
        """The first `channels` drops; more where multiples of widths let fewer have no effect."""
        lower = math.nextafter(self._state.fma, -math.inf)
        return self._made(min(max(channels, self._number_to(lower)), self._most))

    def _number_to(self, target: float) -> int:
        every = range(self._most + 1)
        return min(bisect_left(every, True, key=lambda n: self.work(n) <= target), self._most)

    def _made(self, number: int) -> Decision:
        decision = self.decision(number)
        assert decision is not None  # `number` is at most `_most`
        return decision
