"""Penalty: symmetric group lasso over every axis, and the utility it measures.

Works on flat storage: each element has the ids of the (at most two) lasso groups
that it belongs to, so norms and gradients take a few passes for any number of
tensors. Knows nothing of losses, drops or balance.
"""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gaugelasso.axes import AxisTable, Tensors
from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.groups import Groups
from gaugelasso.kernels.dispatch import fused_flat

Form = Literal["symmetric", "one_sided", "product_norm"]
Calibration = Literal["efficiency", "geometry"]
Coupling = Literal["coupled", "decoupled"]

# A slice with a smaller norm counts as zero: its direction is undefined, so it has no gradient.
_TINY = 1e-20
# The smallest share of the learning rate that a small group keeps.
_LEAST = 1e-3


class Penalty:
    """The penalty of one structure; built again after surgery.

    `strength` is lambda (paper, eq. efficiency_lambda, without rho), per side of index j:
    - efficiency: r_j / sqrt(n)
    - geometry:   sqrt(n of the other side)          (paper, cross-count remark)
    """

    def __init__(
        self,
        table: AxisTable,
        tensors: Tensors,
        store: FlatStore,
        prices: dict[str, np.ndarray],
        form: Form = "symmetric",
        calibration: Calibration = "efficiency",
    ):
        self.form = form
        self.groups = Groups(table, tensors, store)
        self.ranges, self.elements = self.groups.ranges, self.groups.elements
        self.none, self.partner = self.groups.none, self.groups.partner
        self._lookups = [store.segments[name] for name in table.lookups]
        price = np.zeros(self.none + 1)
        for name, span in self.ranges.items():
            price[span.start : span.end] = np.tile(prices[name], 2)
        device, dtype = store.weight.device, store.weight.dtype
        n = self.groups.counts.double().clamp(min=1)
        r = torch.from_numpy(price).to(device)
        self._is_none = torch.arange(self.none + 1, device=device) == self.none
        if calibration == "efficiency":
            strength = r / n.sqrt()
        else:
            strength = n[self.partner].sqrt().masked_fill(self._is_none, 0.0)
        if form == "one_sided":
            for span in self.ranges.values():
                strength[span.side("b")] = 0
        self.strength = strength.to(dtype)
        self.root_count = n.sqrt().to(dtype)
        # Product norm: r * eps_A * eps_B, equal to the symmetric penalty's product at balance.
        self.inverse_price = torch.where(r > 0, 1 / r.clamp(min=_TINY), 0.0).to(dtype)

    def group_sums(self, values: Tensor, factors: Tensor | None = None) -> Tensor:
        """Sum per-element values, times factors, over each group; 0 for the group `none`."""
        return self.groups.sums(values, factors=factors)

    def norms(self, weight: Tensor) -> Tensor:
        """Frobenius norm of every group."""
        if self._fused(weight):
            from gaugelasso.kernels.gpu import penalty

            return penalty.norms(weight, self.groups.members, self.groups.ends)
        return self.groups.sums(weight, squared=True).sqrt()

    def _fused(self, tensor: Tensor) -> bool:
        """Whether to take a fused form: these read the groups of every element."""
        return self.elements.stored and fused_flat(tensor)

    def _length(self, norms: Tensor) -> Tensor:
        """The norm of the gradient, per group."""
        if self.form != "product_norm":
            return self.strength
        other = (self.strength * norms)[self.partner]
        return self.strength * other * self.inverse_price

    def gradient(self, weight: Tensor, norms: Tensor | None = None) -> Tensor:
        """r: lambda T/||T|| of every group, summed over the groups of each element.

        `norms` are those of the weight; they are computed if not given.
        """
        norms = self.norms(weight) if norms is None else norms
        length = self._length(norms)
        if self._fused(weight):
            from gaugelasso.kernels.gpu import penalty

            return penalty.gradient(weight, length, norms, self.elements.ids, _TINY)
        pull = torch.where(norms > _TINY, length / norms.clamp(min=_TINY), 0.0)
        return self.elements.combined(pull, "sum").mul_(weight)

    def hold_unseen_(self, gradient: Tensor, task_gradient: Tensor) -> None:
        """Clear the penalty's gradient of the rows of look-up tables that a batch does not use.

        Their momentum fades, so that the penalty alone would move them by a whole learning rate at
        every step, however small it is.
        """
        for segment in self._lookups:
            unused = ~segment.view(task_gradient).flatten(1).any(1, keepdim=True)
            segment.view(gradient).flatten(1).masked_fill_(unused, 0.0)

    def bounded_rate(self, norms: Tensor, lr: Tensor, bound: float, start: int) -> Tensor:
        """Rates of the elements from `start` on.

        lr, or less where it would change a group by more than `bound` of its RMS. Never less than
        a small share of lr, so that a group can grow again.
        """
        if self._fused(norms):
            from gaugelasso.kernels.gpu import penalty

            roots, ids = self.root_count, self.elements.ids
            return penalty.bounded_rate(norms, roots, ids, lr, bound, _LEAST, start)
        rate = torch.minimum(lr, bound * norms / self.root_count).maximum(_LEAST * lr)
        rate = torch.where(self._is_none, lr, rate)
        return self.elements.combined(rate, "least", start)

    def utility(self, weight: Tensor) -> dict[str, Tensor]:
        """Corrected utility of every index, without rho (paper, corrected_harm).

        omega = sum over the slice of w times the whole penalty gradient: the self
        term lambda||T|| plus the cross terms of the other axes that its elements are on.
        Returns the geometric mean of both sides, which does not depend on the gauge.
        """
        sums = self.group_sums(weight, self.gradient(weight))
        return {
            name: (sums[span.side("a")] * sums[span.side("b")]).clamp(min=0).sqrt()
            for name, span in self.ranges.items()
        }


def ranked(
    utility: dict[str, Tensor], prices: dict[str, np.ndarray]
) -> list[tuple[float, str, int]]:
    """Every index by utility per unit of price, least first: the order to prune in."""
    rows = []
    for name, values in utility.items():
        for index, (value, price) in enumerate(zip(values.tolist(), prices[name], strict=True)):
            rows.append((value / price if price > 0 else math.inf, name, index))
    return sorted(rows)
