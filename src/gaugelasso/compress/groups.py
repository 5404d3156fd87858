"""Groups: the elements of flat storage that make up each index's slice on each side.

Penalty, balance and drop all measure these slices, so they share one index of them. Built on the
device, once per structure. Knows nothing of what is measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from gaugelasso.axes import Axis, AxisTable, Side, Slot, Tensors, on_host, spread, width
from gaugelasso.compress.flat import FlatStore, pick


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

    `ids[0]` and `ids[1]` hold, for every element, the groups that it is in, or `none` where it is
    in fewer. `none` is an additional group without elements. The elements of group g are
    `members[ends[g] : ends[g + 1]]`.
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
        counts = self._counts(table, spans, on_host(tensors, table.links()))
        ends = np.concatenate([[0], counts.cumsum()])
        self._cuts = [slice(int(ends[w.start]), int(ends[w.stop])) for w in self.waves]
        partner = np.arange(self.none + 1)
        for span in spans.values():
            a, b = span.side("a"), span.side("b")
            partner[a], partner[b] = partner[b].copy(), partner[a].copy()
        device = store.weight.device
        self.partner, self.ends, self.counts = (
            torch.from_numpy(array).to(device) for array in (partner, ends, counts)
        )
        index = torch.arange(self.none, device=device)
        # Ranges, and so members, are in the order of the ids.
        slots = [
            (slot, index[span.side(side)])
            for name, span in spans.items()
            for side, side_slots in table[name].sides()
            for slot in side_slots
        ]
        # At least one vector: a table without axes has no slots.
        self.ids = self.per_element(slots, tensors) or [self._nowhere()]
        self.members = self._gather_members(table, tensors, spans)

    def _counts(
        self, table: AxisTable, spans: Mapping[str, GroupRange], links: Tensors
    ) -> np.ndarray:
        """n: the number of elements of each group."""
        counts = np.zeros(self.none + 1, dtype=np.int64)
        for name, span in spans.items():
            for side, slots in table[name].sides():
                side_counts = counts[span.side(side)]
                for slot in slots:
                    shape = self._store.segments[slot.tensor].shape
                    where = slice(None) if slot.link is None else links[slot.link].numpy()
                    side_counts[where] += shape.numel() // max(shape[slot.dim], 1)
        return counts

    def per_element(self, slots: list[tuple[Slot, Tensor]], tensors: Tensors) -> list[Tensor]:
        """For each element the values of the slots on its tensor, as flat vectors; else `none`."""
        segments = self._store.segments
        result: list[Tensor] = []
        used = dict.fromkeys(segments, 0)
        for slot, values in slots:
            if used[slot.tensor] == len(result):
                result.append(self._nowhere())
            view = segments[slot.tensor].view(result[used[slot.tensor]])
            view.copy_(spread(values, slot, tensors))
            used[slot.tensor] += 1
        return result

    def _nowhere(self) -> Tensor:
        """Ids of elements that are in no group."""
        weight = self._store.weight
        return torch.full(weight.shape, self.none, dtype=torch.long, device=weight.device)

    def _gather_members(
        self, table: AxisTable, tensors: Tensors, spans: Mapping[str, GroupRange]
    ) -> Tensor:
        """The flat positions of each group's elements, group by group."""
        positions = torch.arange(len(self._store), device=self._store.weight.device)
        grids = self._store.views(positions)
        parts = [positions[:0]]
        for name in spans:
            for _, slots in table[name].sides():
                rows = [
                    grids[slot.tensor].movedim(slot.dim, 0)[..., None].flatten(1) for slot in slots
                ]
                if any(slot.link is not None for slot in slots):
                    parts.append(_by_index(rows, slots, tensors))
                else:
                    parts.append(torch.cat(rows, 1).reshape(-1))
        return torch.cat(parts)

    def sums(self, values: Tensor, wave: int | None = None) -> Tensor:
        """Sum per-element values over each group, of all waves or of one; 0 for `none`."""
        members, ends = self.members, self.ends
        if wave is not None:
            span, cut = self.waves[wave], self._cuts[wave]
            members, ends = members[cut], ends[span.start : span.stop + 1] - cut.start
        return torch.segment_reduce(
            pick(values, members), "sum", offsets=ends, initial=0.0, unsafe=True
        )


def _by_index(rows: list[Tensor], slots: tuple[Slot, ...], tensors: Tensors) -> Tensor:
    """Rows of several slots, of which some have a position map, in the order of the indices."""
    keys = []
    for row, slot in zip(rows, slots, strict=True):
        direct = torch.arange(len(row), device=row.device)
        index = direct if slot.link is None else tensors[slot.link]
        keys.append(index[:, None].expand(row.shape).reshape(-1))
    order = torch.cat(keys).argsort(stable=True)
    return torch.cat([row.reshape(-1) for row in rows])[order]
