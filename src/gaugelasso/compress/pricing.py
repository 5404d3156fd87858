"""Accountings: the work per token, and how much of it each index saves when it is cut.

An accounting weights the cost terms that a model declares. The price of an index is the exact
difference of two counts. Knows nothing of weights or training.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from gaugelasso.axes import AxisTable, Cost, Tensors

Widths = Mapping[str, "int | np.ndarray"]


@dataclass(frozen=True)
class Accounting:
    """The units of work of one cost term per token, given its length and visible keys."""

    name: str
    weight: Callable[[Cost, int, float], float]


def _fma(cost: Cost, length: int, visible: float) -> float:
    match cost.kind:
        case "matmul" | "scale":
            return 1.0
        case "scores" | "mix":
            return visible * cost.unit
        case "lookup" | "rotation":
            return 0.0


def _paper(cost: Cost, length: int, visible: float) -> float:
    # Derived from the paper's figures: every parameter counts once, and attention runs over the
    # whole length, with a RoPE pair as one channel.
    match cost.kind:
        case "scores" | "mix":
            return float(length)
        case "matmul" | "scale" | "lookup" | "rotation":
            return 1.0


ACCOUNTINGS: dict[str, Accounting] = {
    "fma": Accounting("fma", _fma),
    "paper": Accounting("paper", _paper),
}


def count(table: AxisTable, accounting: Accounting, widths: Widths) -> float | np.ndarray:
    """Work per token at the given widths: numbers, or arrays for several cases at once."""
    return _work(table.costs, table.context, accounting, widths)


def _work(
    costs: Iterable[Cost], context: tuple[int, float], accounting: Accounting, widths: Widths
) -> float | np.ndarray:
    total: float | np.ndarray = 0.0
    for cost in costs:
        work = cost.factor * accounting.weight(cost, *context)
        total = total + work * math.prod(widths[name] for name in cost.axes)
    return total


def total_fma(table: AxisTable, accounting: Accounting, tensors: Tensors) -> float:
    """Work per token of the model as it is now."""
    return float(count(table, accounting, table.widths(tensors)))


def prices(table: AxisTable, accounting: Accounting, tensors: Tensors) -> dict[str, np.ndarray]:
    """r: axis name -> the work per token that each index saves when it is cut."""
    widths = table.widths(tensors)
    touching: dict[str, list[int]] = {name: [] for name in widths}
    for k, cost in enumerate(table.costs):
        for name in cost.axes:
            touching[name].append(k)
    result = {}
    for axis in table.axes:
        size = widths[axis.name]
        without: dict[str, int | np.ndarray] = {axis.name: size - 1}
        # An index with position maps removes one position of every axis that it reaches.
        for home, link in {table.home(slot): slot.link for slot in axis.linked()}.items():
            touched = np.zeros(size, dtype=np.int64)
            touched[tensors[str(link)].cpu().numpy()] = 1
            without[home] = without.get(home, widths[home]) - touched
        # All other terms are the same in both counts.
        terms = [table.costs[k] for k in sorted({k for name in without for k in touching[name]})]
        now = _work(terms, table.context, accounting, widths)
        saved = now - _work(terms, table.context, accounting, {**widths, **without})
        result[axis.name] = np.broadcast_to(saved, (size,)).copy()
    return result
