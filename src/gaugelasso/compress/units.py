"""Units: the indices that go together, and the order in which units go.

In a free shape every index is a unit. In a stock shape one index of each layer is a unit, a site of
the stream is one, and a whole layer is one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gaugelasso.compress import pricing
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.shape import SHAPES, Stock

_TINY = 1e-300


@dataclass(frozen=True)
class Units:
    """Indices unit after unit, those with the least score per unit of price first.

    - axes, indices: the number of the axis, and the index on it
    - ends: how many indices the first unit has, the first two have, and so on
    - saved: the same of their prices
    - kinds: the kind of axis that makes up the unit; empty for a whole layer
    """

    axes: np.ndarray
    indices: np.ndarray
    ends: np.ndarray
    saved: np.ndarray
    kinds: np.ndarray

    def complete(self, keeps: Sequence[np.ndarray]) -> np.ndarray:
        """The numbers of the units of which no index is kept; keep-sets in the order of axes."""
        starts = np.concatenate([[0], np.cumsum([len(keep) for keep in keeps])])
        kept = np.concatenate([*keeps, np.zeros(0, dtype=bool)])
        left = np.cumsum(kept[starts[self.axes] + self.indices])[self.ends - 1]
        return np.flatnonzero(np.diff(left, prepend=0) == 0)

    def of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The axes and indices of some units."""
        chosen = np.zeros(len(self.ends), dtype=bool)
        chosen[numbers] = True
        places = np.repeat(chosen, np.diff(self.ends, prepend=0))
        return self.axes[places], self.indices[places]


@dataclass(frozen=True)
class _Group:
    """Units of one kind: row r of `axes` and `indices` is the r-th unit."""

    axes: np.ndarray
    indices: np.ndarray
    scores: np.ndarray
    prices: np.ndarray
    kind: str = ""


def units_of(state: ModelState, scores: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> Units:
    """The units of the model as it is now. `scores` are by axis; `held` are indices that stay.

    So do the index of the highest score of an axis that does not silence its owner, as in other
    events, and that of each axis of an operator that may not be removed.
    """
    known = {}
    for axis in state.table.axes:
        score = scores[axis.name].double().numpy().copy()
        if len(score):
            last = score.argmax()
            score[held[axis.name].numpy()] = math.inf
            if not axis.silences or axis.owner in state.table.required:
                score[last] = math.inf
        known[axis.name] = score
    shape = SHAPES[state.options.shape]
    groups = _singles(state, known) if shape is None else _stock(state, known, shape)
    return _ordered(list(groups))


def _ordered(groups: list[_Group]) -> Units:
    if not groups:
        nothing = np.empty(0, dtype=int)
        return Units(nothing, nothing, nothing, np.empty(0), np.empty(0, dtype=str))
    share = np.concatenate([_per_price(group) for group in groups])
    price = np.concatenate([group.prices for group in groups])
    order = np.argsort(share, kind="stable")
    order = order[np.isfinite(share[order])]
    counts = [len(group.scores) for group in groups]
    origins = np.repeat(np.arange(len(groups)), counts)[order]
    ends = np.cumsum(np.array([group.axes.shape[1] for group in groups])[origins])
    axes, indices = (np.empty(ends[-1] if len(ends) else 0, dtype=int) for _ in range(2))
    # One search for all groups: one in each would take longer than the rest of an event.
    found = np.bincount(origins, minlength=len(groups))
    places = np.split(np.argsort(origins, kind="stable"), np.cumsum(found)[:-1])
    firsts = np.cumsum([0, *counts[:-1]])
    for group, first, place in zip(groups, firsts, places, strict=True):
        rows, size = order[place] - first, group.axes.shape[1]
        to = (ends[place] - size)[:, None] + np.arange(size)
        axes[to], indices[to] = group.axes[rows], group.indices[rows]
    kinds = np.array([group.kind for group in groups])[origins]
    return Units(axes, indices, ends, np.cumsum(price[order]), kinds)


def _per_price(group: _Group) -> np.ndarray:
    """The scores per unit of price; infinite without a price."""
    share, priced = np.full(len(group.scores), math.inf), group.prices > 0
    share[priced] = group.scores[priced] / group.prices[priced]
    return share


def _singles(
    state: ModelState, scores: Mapping[str, np.ndarray], kinds: tuple[str, ...] | None = None
) -> Iterator[_Group]:
    """One unit for each index of the axes of these kinds; None: of all."""
    for number, axis in enumerate(state.table.axes):
        score = scores[axis.name]
        if len(score) and (kinds is None or axis.kind in kinds):
            column = np.arange(len(score))[:, None]
            price = state.prices[axis.name]
            yield _Group(np.full_like(column, number), column, score, price, axis.kind)


def _stock(state: ModelState, scores: Mapping[str, np.ndarray], shape: Stock) -> Iterator[_Group]:
    yield from _singles(state, scores, shape.single)
    for kind in shape.equal:
        yield from _in_step(state, scores, kind)
    yield from _layers(state, scores)


def _in_step(state: ModelState, scores: Mapping[str, np.ndarray], kind: str) -> Iterator[_Group]:
    """The r-th unit has the index of the r-th least score of every layer; one unit stays."""
    numbers = [number for number, axis in enumerate(state.table.axes) if axis.kind == kind]
    if not numbers:
        return
    names = [state.table.axes[number].name for number in numbers]
    orders = np.stack([np.argsort(scores[name], kind="stable") for name in names], axis=1)[:-1]
    columns = range(len(names))
    score, price = (
        np.stack([values[name][orders[:, each]] for each, name in zip(columns, names, strict=True)])
        for values in (scores, state.prices)
    )
    axes = np.broadcast_to(np.array(numbers), orders.shape)
    yield _Group(axes, orders, score.sum(0), price.sum(0), kind)


def _layers(state: ModelState, scores: Mapping[str, np.ndarray]) -> Iterator[_Group]:
    """One unit for each layer but the most useful one: all indices of its operators.

    The score of an operator is the sum over an axis, the largest of these: each axis estimates the
    same harm. An index that is held does not hold its whole layer.
    """
    table, widths = state.table, state.widths()
    found = []
    owned = table.owners()
    numbers = {axis.name: number for number, axis in enumerate(table.axes)}
    for layer in table.layers:
        names = [name for owner in layer for name in owned[owner]]
        score = sum(max(_finite_sum(scores[name]) for name in owned[owner]) for owner in layer)
        without = widths | dict.fromkeys(names, 0)
        saved = state.fma - float(pricing.count(state.plan.terms, without))
        axes = np.concatenate([np.full(widths[name], numbers[name]) for name in names])
        indices = np.concatenate([np.arange(widths[name]) for name in names])
        found.append(_Group(axes[None], indices[None], np.array([score]), np.array([saved])))
    shares = [float(each.scores[0] / max(each.prices[0], _TINY)) for each in found]
    stays = int(np.argmax(shares)) if shares else 0
    yield from (each for number, each in enumerate(found) if number != stays)


def _finite_sum(scores: np.ndarray) -> float:
    return float(scores[np.isfinite(scores)].sum())
