"""Accountings: what a model costs, and how much of it each index saves when it is cut.

A cost model turns a table into terms, each a function of some widths. The total is their sum, and
the price of an index is the difference of two sums. Knows nothing of weights or training.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np

from gaugelasso.axes import Axis, AxisTable, Cost, Tensors

Value = float | np.ndarray
Widths = Mapping[str, "int | np.ndarray"]


class Term:
    """One part of the cost, which depends on the widths of `axes`.

    `fixed` is what its operator costs at any width: it is saved only with the whole operator.
    `full` are the widths that axes have before anything is cut, as far as the term knows them.
    """

    axes: tuple[str, ...]
    fixed: float = 0.0
    full: Mapping[str, int] = MappingProxyType({})

    def work(self, widths: Widths) -> Value:
        """What it costs at these widths: numbers, or arrays for several cases at once."""
        raise NotImplementedError

    def smooth(self, widths: Widths) -> Value:
        """What prices are differences of: `work`, unless that has steps."""
        return self.work(widths)


@dataclass(frozen=True)
class Product(Term):
    """A factor times the product of the widths."""

    axes: tuple[str, ...]
    factor: float

    def work(self, widths: Widths) -> Value:
        product: Value = self.factor * math.prod(widths[name] for name in self.axes)
        return product


class CostModel(Protocol):
    """What is counted. `unit` is what a total is a number of."""

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str: ...

    def terms(self, table: AxisTable, tensors: Tensors) -> Sequence[Term]:
        """The parts of the cost of a model with this table; UserError if they are not known."""
        ...

    def preferred(self, table: AxisTable) -> dict[str, int]:
        """Axis name -> the multiple of indices that its width should be, where there is one."""
        ...


@dataclass(frozen=True)
class Accounting:
    """Work per token: each cost term times a weight, given its length and visible keys."""

    name: str
    weight: Callable[[Cost, int, float], float]
    unit: str = "FMA per token"

    def terms(self, table: AxisTable, tensors: Tensors) -> list[Product]:
        return [
            Product(cost.axes, cost.factor * self.weight(cost, *table.context))
            for cost in table.costs
        ]

    def preferred(self, table: AxisTable) -> dict[str, int]:
        return {}


def _fma(cost: Cost, length: int, visible: float) -> float:
    match cost.kind:
        case "matmul" | "scale":
            return 1.0
        case "scores" | "mix":
            return cost.visible_keys(length, visible) * cost.unit
        case "lookup" | "rotation" | "cache":
            return 0.0


def _paper(cost: Cost, length: int, visible: float) -> float:
    # Derived from the paper's figures: every parameter counts once, and attention runs over the
    # whole length (here: the window), with a RoPE pair as one channel.
    match cost.kind:
        case "scores" | "mix":
            return float(length if cost.window is None else min(length, cost.window))
        case "matmul" | "scale" | "lookup" | "rotation":
            return 1.0
        case "cache":
            return 0.0


ACCOUNTINGS: dict[str, Accounting] = {
    "fma": Accounting("fma", _fma),
    "paper": Accounting("paper", _paper),
}


def count(terms: Iterable[Term], widths: Widths) -> Value:
    """The cost at the given widths: a number, or an array for several cases at once."""
    total: Value = 0.0
    for term in terms:
        total = total + term.work(widths)
    return total


def total_fma(table: AxisTable, model: CostModel, tensors: Tensors) -> float:
    """The cost of the model as it is now: work per token, or what else the cost model counts."""
    return float(count(model.terms(table, tensors), table.widths(tensors)))


def least_cost(table: AxisTable, model: CostModel, tensors: Tensors) -> float:
    """What no cut goes below: the parts that must stay, with one index in each of their axes.

    A lower bound, where no term falls with a larger width. A term without axes may go with its
    operator, so it counts only where all must stay.
    """
    all_stay = set(table.owners()) <= set(table.required)
    stays = [
        term
        for term in model.terms(table, tensors)
        if (term.axes or all_stay) and {table[name].owner for name in term.axes} <= table.required
    ]
    return float(count(stays, {axis.name: 1 for axis in table.axes}))


def prices(table: AxisTable, model: CostModel, tensors: Tensors) -> dict[str, np.ndarray]:
    """r: axis name -> how much less the model costs when an index is cut.

    The difference of two smooth counts, and an equal share of what only the removal of the whole
    operator saves.
    """
    terms, widths = model.terms(table, tensors), table.widths(tensors)
    touching: dict[str, list[int]] = {name: [] for name in widths}
    for k, term in enumerate(terms):
        for name in term.axes:
            touching[name].append(k)
    shares = _fixed_shares(table, terms, widths)
    result = {}
    for axis in table.axes:
        size = widths[axis.name]
        without: dict[str, int | np.ndarray] = {axis.name: size - 1}
        # An index with position maps removes one position of every axis that it reaches.
        for home, touched in _touched(table, axis, size, tensors).items():
            without[home] = without.get(home, widths[home]) - touched
        # All other terms are the same in both counts.
        some = [terms[k] for k in sorted({k for name in without for k in touching[name]})]
        saved = _smooth(some, widths) - _smooth(some, {**widths, **without})
        price = np.broadcast_to(saved, (size,)).copy()
        for name in without.keys() & shares.keys():
            price += shares[name] * (widths[name] - without[name])
        result[axis.name] = price
    return result


def _smooth(terms: Iterable[Term], widths: Widths) -> Value:
    total: Value = 0.0
    for term in terms:
        total = total + term.smooth(widths)
    return total


def _touched(table: AxisTable, axis: Axis, size: int, tensors: Tensors) -> dict[str, np.ndarray]:
    """Home axis -> for each index of a linked axis, 1 if it has a position there.

    A position with several uses counts where all of them are of one index: it goes with that one.
    """
    found = {}
    for home, slots in table.uses(axis).items():
        first, *others = (tensors[str(slot.link)].cpu().numpy() for slot in slots)
        alone = np.all([first == other for other in others], axis=0) if others else slice(None)
        touched = np.zeros(size, dtype=np.int64)
        touched[first[alone]] = 1
        found[home] = touched
    return found


def _fixed_shares(
    table: AxisTable, terms: Sequence[Term], widths: Mapping[str, int]
) -> dict[str, float]:
    """Axis name -> the share of each index in the fixed cost of an operator that may go.

    A cost that is there at any width but 0 is replaced by the straight line up to the full width:
    no convex function below it is higher. At the full widths the shares of all indices of an
    operator add up to its fixed cost.
    """
    fixed: dict[str, float] = {}
    full: dict[str, int] = {}
    for term in terms:
        for name, width in term.full.items():
            full[name] = max(widths[name], min(width, full.get(name, width)))
        owners = {table[name].owner for name in term.axes}
        for owner in owners - table.required - {None}:
            fixed[str(owner)] = fixed.get(str(owner), 0.0) + term.fixed
    shares: dict[str, float] = {}
    for owner, names in table.owners().items():
        # An axis that does not silence its owner never takes the operator with it.
        taking = [name for name in names if table[name].silences and widths[name]]
        if fixed.get(owner):
            each = fixed[owner] / len(taking)
            shares |= {name: each / full.get(name, widths[name]) for name in taking}
    return shares
