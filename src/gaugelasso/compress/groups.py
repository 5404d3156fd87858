"""Groups: the elements of flat storage that make up each index's slice on each side.

Penalty, balance and drop all measure these slices, so they share one index of them. Built on the
device, once per structure. Knows nothing of what is measured.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from gaugelasso.axes import Axis, AxisTable, Side, Slot, Tensors, on_host, width
from gaugelasso.compress.element_map import ElementMap
from gaugelasso.compress.flat import FlatStore, pick
from gaugelasso.kernels.dispatch import fused_flat

if TYPE_CHECKING:  # Triton may not be installed
    from gaugelasso.kernels.gpu.row_sums import RowSums


@dataclass(frozen=True)
class GroupRange:
    """The group ids of one axis: `width` on side A, then as many on side B."""

    start: int
    width: int

    @property
    def end(self) -> int:
        return self.start + 2 * self.width

    def side(self, side: Side) -> slice:
        begin = self.start + (self.width if side == "b" else 0)
        return slice(begin, begin + self.width)


def waves(table: AxisTable) -> list[list[Axis]]:
    """The axes in rounds, as few as keep table order between axes that share a tensor.

    Axes of one wave share no tensor that changes, so handling them at once gives the same result
    as one after another.
    """
    seen: dict[str, int] = {}  # tensor -> number of waves up to the last one that changes it
    result: list[list[Axis]] = []
    for axis in table.axes:
        changed = {slot.tensor for slot in axis.side_a + axis.side_b}
        changed |= {slot.tensor for slot in axis.riders if slot.power}
        place = max(seen.get(tensor, 0) for tensor in changed)
        seen |= dict.fromkeys(changed, place + 1)
        if place == len(result):
            result.append([])
        result[place].append(axis)
    return result


def weighed_with_riders(table: AxisTable, tensors: Tensors) -> AxisTable:
    """The table with every trained rider that is rescaled like a side, on that side.

    A balance must weigh such a rider too. A unit with small weights and a large bias is large: by
    its weights alone, every balance would enlarge the bias.
    """

    def moved(axis: Axis, power: int) -> tuple[Slot, ...]:
        return tuple(
            slot
            for slot in axis.riders
            if slot.power == power and isinstance(tensors[slot.tensor], nn.Parameter)
        )

    if not any(moved(axis, power) for axis in table.axes for power in (1, -1)):
        return table
    axes = []
    for axis in table.axes:
        on_a, on_b = moved(axis, 1), moved(axis, -1)
        left = tuple(slot for slot in axis.riders if slot not in on_a + on_b)
        sides = axis.side_a + on_a, axis.side_b + on_b
        axes.append(replace(axis, side_a=sides[0], side_b=sides[1], riders=left))
    return replace(table, axes=tuple(axes))


class Groups:
    """The groups of one structure, numbered wave by wave.

    `elements` maps every element to the groups that it is in. `none` is an additional group without
    elements. The elements of group g are at `members[ends[g] : ends[g + 1]]` of flat storage. In
    large models, where no element has a number (`elements.stored`), these are places among sums of
    rows and columns instead: those of slot after slot, in the order of the groups.
    """

    def __init__(self, table: AxisTable, tensors: Tensors, store: FlatStore):
        self._store = store
        self.waves: list[slice] = []
        spans: dict[str, GroupRange] = {}
        start = 0
        for wave in waves(table):
            begin = start
            for axis in wave:
                spans[axis.name] = GroupRange(start, width(axis, tensors))
                start = spans[axis.name].end
            self.waves.append(slice(begin, start))
        self.none = start
        self.ranges = {axis.name: spans[axis.name] for axis in table.axes}
        # At least one slot on each side, in the order of the ids, and so of the waves.
        self._slots = [
            (slot, spans[axis.name].side(side))
            for wave in waves(table)
            for axis in wave
            for side, side_slots in axis.sides()
            for slot in side_slots
        ]
        index = torch.arange(self.none, device=store.weight.device)
        slots = [(slot, index[span]) for slot, span in self._slots]
        self.elements = ElementMap(store, slots, tensors, self.none)
        links = on_host(tensors, table.links())
        counts = self._counts(links)
        lengths = counts if self.elements.stored else self._counts(links, rows=True)
        ends = np.concatenate([[0], lengths.cumsum()])
        self._cuts = [slice(int(ends[w.start]), int(ends[w.stop])) for w in self.waves]
        partner = np.arange(self.none + 1)
        for span in spans.values():
            a, b = span.side("a"), span.side("b")
            partner[a], partner[b] = partner[b].copy(), partner[a].copy()
        device = store.weight.device
        self.partner, self.ends, self.counts = (
            torch.from_numpy(array).to(device) for array in (partner, ends, counts)
        )
        self.members = self._gather_members(tensors)

    def _counts(self, links: Tensors, rows: bool = False) -> np.ndarray:
        """n: the number of elements of each group; with `rows`, of rows and columns."""
        counts = np.zeros(self.none + 1, dtype=np.int64)
        for slot, span in self._slots:
            shape = self._store.segments[slot.tensor].shape
            where = slice(None) if slot.link is None else links[slot.link].numpy()
            counts[span][where] += 1 if rows else shape.numel() // max(shape[slot.dim], 1)
        return counts

    def element_map(self, slots: list[tuple[Slot, Tensor]], tensors: Tensors) -> ElementMap:
        """A map of the elements of these slots alone, to other entries."""
        return ElementMap(self._store, slots, tensors, self.none)

    def _gather_members(self, tensors: Tensors) -> Tensor:
        """The members of each group, group by group."""
        parts = [torch.empty(0, dtype=torch.int32, device=self._store.weight.device)]
        for _, side in itertools.groupby(zip(self._slots, self._rows(), strict=True), _span):
            pairs = [(slot, rows) for (slot, _), rows in side]
            if any(slot.link is not None for slot, _ in pairs):
                parts.append(_by_index(pairs, tensors))
            else:
                parts.append(torch.cat([rows for _, rows in pairs], 1).reshape(-1))
        return torch.cat(parts)

    def _rows(self) -> Iterator[Tensor]:
        """The members of each slot, [indices, members of each]."""
        device = self._store.weight.device
        if self.elements.stored:
            grids = self._store.views(
                torch.arange(len(self._store), dtype=torch.int32, device=device)
            )
            for slot, _ in self._slots:
                yield grids[slot.tensor].movedim(slot.dim, 0)[..., None].flatten(1)
            return
        start = 0
        for slot, _ in self._slots:
            end = start + self._store.segments[slot.tensor].shape[slot.dim]
            yield torch.arange(start, end, dtype=torch.int32, device=device)[:, None]
            start = end

    def sums(
        self,
        values: Tensor,
        wave: int | None = None,
        squared: bool = False,
        factors: Tensor | None = None,
    ) -> Tensor:
        """Sum per-element values over each group, of all waves or of one; 0 for `none`.

        With `squared`, the sums of their squares, and with `factors` those of their products with
        these, which needs less memory than to multiply them before.
        """
        factors = values if squared else factors
        members, ends, span = self.members, self.ends, slice(0, self.none)
        if wave is not None:
            span, cut = self.waves[wave], self._cuts[wave]
            members, ends = members[cut], ends[span.start : span.stop + 1] - cut.start
        if not self.elements.stored:
            if wave is None and fused_flat(values):
                values = self._fused_row_sums(values, factors)
            else:
                values, before = self._row_sums(values, span, factors)
                members = members - before
        elif factors is not None:
            values = values * factors
        return torch.segment_reduce(
            pick(values, members), "sum", offsets=ends, initial=0.0, unsafe=True
        )

    @cached_property
    def _fused_row_sums(self) -> "RowSums":
        """The same as `_row_sums` of all waves, in three launches."""
        from gaugelasso.kernels.gpu.row_sums import RowSums

        places = [(self._store.segments[slot.tensor], slot.dim) for slot, _ in self._slots]
        device = self._store.weight.device
        return RowSums([(each.start, each.shape, dim) for each, dim in places], device)

    def _row_sums(self, values: Tensor, wave: slice, factors: Tensor | None) -> tuple[Tensor, int]:
        """Sums of the rows and columns on the slots of a wave, and how many come before them."""
        views, before, sums = self._store.views(values), 0, [values[:0]]
        others = {} if factors is None else self._store.views(factors)
        for slot, span in self._slots:
            view = views[slot.tensor]
            if span.start < wave.start:
                before += view.shape[slot.dim]
            elif span.start < wave.stop:
                product = view * others[slot.tensor] if others else view
                sums.append(product.movedim(slot.dim, 0)[..., None].flatten(1).sum(1))
        return torch.cat(sums), before


def _span(entry: tuple[tuple[Slot, slice], Tensor]) -> tuple[int, int]:
    (_, span), _ = entry
    return span.start, span.stop


def _by_index(pairs: list[tuple[Slot, Tensor]], tensors: Tensors) -> Tensor:
    """Rows of several slots, of which some have a position map, in the order of the indices."""
    keys = []
    for slot, row in pairs:
        direct = torch.arange(len(row), device=row.device)
        index = direct if slot.link is None else tensors[slot.link]
        keys.append(index[:, None].expand(row.shape).reshape(-1))
    order = torch.cat(keys).argsort(stable=True)
    return torch.cat([row.reshape(-1) for _, row in pairs])[order]
