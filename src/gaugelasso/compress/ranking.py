"""The order in which units of indices go: by a score per unit of price, least first.

Decides only; `ModelState.cut_` cuts.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from gaugelasso.compress.drop import Decision, channel_rms, close_and_round
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.shape import SHAPES, stock_grain
from gaugelasso.compress.units import units_of

# The number of drops is found up to this share of all of them: a decision takes a while in a large
# model.
_EXACT = 1 / 4096


class DropPlanner:
    """What keep-sets lead to in a model as it is now. In which order indices go is a subclass's."""

    def __init__(self, state: ModelState):
        self._state, self._widths = state, state.widths()
        self._tensors = {
            # Of parameters the shapes alone: a cut that is undone replaces them, and no planner is
            # to hold the memory of those before it.
            name: tensor.detach().to("meta") if isinstance(tensor, nn.Parameter) else tensor
            for name, tensor in state.readable().items()
        }
        self.rms = channel_rms(state.plan.penalty.groups, state.plan.store.weight)

    def keep_all(self) -> dict[str, Tensor]:
        """Keep-sets without a drop."""
        return {name: torch.ones(size, dtype=torch.bool) for name, size in self._widths.items()}

    def closed(self, keeps: dict[str, Tensor]) -> Decision | None:
        """What keep-sets lead to; None if a required operator would go."""
        state = self._state
        multiples = state.options.multiple, state.plan.preferred
        return close_and_round(state.table, self._tensors, keeps, self.rms, *multiples)

    def work_of(self, decision: Decision | None) -> float:
        """Work per token after a decision; -inf if a required operator would go."""
        return -math.inf if decision is None else self._state.work_after(decision)


class Ranking(DropPlanner):
    """The units of a model (`units.units_of`). Drops are made from the front."""

    def __init__(self, state: ModelState, scores: Mapping[str, Tensor], held: Mapping[str, Tensor]):
        super().__init__(state)
        self._units = units_of(state, scores, held)

    def __len__(self) -> int:
        return len(self._units.ends)

    def keeps(self, number: int) -> dict[str, Tensor]:
        """Keep-sets of all axes without the first `number` units."""
        return self._without(np.arange(number))

    def _without(self, numbers: np.ndarray) -> dict[str, Tensor]:
        """Keep-sets of all axes without some units."""
        keeps, (axes, indices) = self.keep_all(), self._units.of(numbers)
        for axis in np.unique(axes):
            going = torch.from_numpy(indices[axes == axis])
            keeps[self._state.table.axes[axis].name][going] = False
        return keeps

    def closed(self, keeps: dict[str, Tensor]) -> Decision | None:
        """As of any planner. In a stock shape units go as a whole, and multiples are of units."""
        state = self._state
        shape = SHAPES[state.options.shape]
        if shape is None:
            return super().closed(keeps)
        names = [axis.name for axis in state.table.axes]
        going = self._units.complete([keeps[name].numpy() for name in names])
        widths = self._widths
        for kind in (*shape.equal, *shape.single):
            of_kind = going[self._units.kinds[going] == kind]
            width = max((widths[a.name] for a in state.table.axes if a.kind == kind), default=0)
            grain = stock_grain(shape, kind, state.table, state.options.multiple,
                                state.plan.preferred)  # fmt: skip
            # The last ones, which are the most useful, stay to make up a multiple.
            back = min(-(width - len(of_kind)) % grain, len(of_kind))
            going = np.setdiff1d(going, of_kind[len(of_kind) - back :])
        return close_and_round(state.table, self._tensors, self._without(going), self.rms, 1)

    def work(self, number: int) -> float:
        """Work per token after the first `number` drops."""
        return self.work_of(self.closed(self.keeps(number)))

    def number_to(self, target: float) -> int:
        """About the fewest drops that bring the work to `target`, at most all that are possible.

        The sum of prices is a first guess: what two drops save together is less than that.
        """
        low, high, fma = 0, len(self), self._state.fma
        guess = int(np.searchsorted(self._units.saved, fma - target)) + 1
        while high - low > 1 + _EXACT * len(self):
            middle = min(max(guess, low + 1), high - 1)
            if self.work(middle) <= target:
                high, guess = middle, int(0.9 * middle)
            else:
                low, guess = middle, int(1.1 * middle) + 1
            if not low < guess < high:
                guess = (low + high) // 2
        return high if math.isfinite(self.work(high)) else low
