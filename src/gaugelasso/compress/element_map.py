"""Element map: which entries of a small vector every element of flat storage refers to.

An element of a matrix is in the group of its row and in that of its column. Values of groups (a
pull, a rate, a factor) become values of elements by a look-up of both. Knows nothing of what the
values mean.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from gaugelasso.axes import Slot, Tensors, spread
from gaugelasso.compress.flat import FlatStore, Segment, pick

# Up to so many parameters every element has its entries stored, in 4 bytes each: one pass then
# does for all tensors, which is faster where there are many small ones. Of larger models only
# those of each row and column are stored, which takes next to no memory and a pass per tensor.
# On a CPU a pass is no launch, and reading stored entries soon costs more than it saves.
MOST_STORED, MOST_STORED_ON_CPU = 2**26, 2**19

How = Literal["sum", "product", "least"]
_OPERATIONS: dict[How, Callable[..., Any]] = {
    "sum": torch.add,
    "product": torch.mul,
    "least": torch.minimum,
}


class ElementMap:
    """The entries of all elements, from slots with the entry of each of their indices.

    An element that is on several slots has as many entries. One that is on none, or on fewer than
    another, has the entry `none`, whose value must change no result. `ids` are the stored entries:
    vectors of the storage's length, or none of a large model.
    """

    def __init__(
        self, store: FlatStore, slots: list[tuple[Slot, Tensor]], tensors: Tensors, none: int
    ):
        self._store, self._none = store, none
        on_cpu = store.weight.device.type == "cpu"
        most = min(MOST_STORED, MOST_STORED_ON_CPU) if on_cpu else MOST_STORED
        self.stored = len(store) <= most
        self.ids: list[Tensor] = []
        self._slots: dict[str, list[Slot]] = {name: [] for name in store.segments}
        entries: dict[str, list[Tensor]] = {name: [] for name in store.segments}
        for slot, values in slots:
            self._slots[slot.tensor].append(slot)
            entry = values if slot.link is None else values[tensors[slot.link]]
            entries[slot.tensor].append(entry)
            if self.stored:
                self._store_(slot, values, tensors)
        if self.stored:
            self.ids = self.ids or [self._nowhere()]
            return
        every = [entry for name in store.segments for entry in entries[name]]
        self._sizes = [len(entry) for entry in every]
        self._entries = torch.cat([*every, torch.tensor([none], device=store.weight.device)])

    def _store_(self, slot: Slot, values: Tensor, tensors: Tensors) -> None:
        place = len(self._slots[slot.tensor]) - 1
        if place == len(self.ids):
            self.ids.append(self._nowhere())
        view = self._store.segments[slot.tensor].view(self.ids[place])
        view.copy_(spread(values, slot, tensors))

    def _nowhere(self) -> Tensor:
        weight = self._store.weight
        return torch.full(weight.shape, self._none, dtype=torch.int32, device=weight.device)

    def combined(self, values: Tensor, how: How, start: int = 0) -> Tensor:
        """The sum, product or least of each element's entries, of the elements from `start` on.

        `start` is the first element of a tensor.
        """
        operation = _OPERATIONS[how]
        if self.stored:
            result = pick(values, self.ids[0][start:])
            for ids in self.ids[1:]:
                operation(result, pick(values, ids[start:]), out=result)
            return result
        result = values.new_empty(len(self._store) - start)
        for segment, parts in self._broadcast(values):
            if segment.start < start:
                continue
            view = Segment(segment.start - start, segment.shape).view(result)
            first, *others = parts
            if not others:
                view.copy_(first)
            for k, other in enumerate(others):
                operation(view if k else first.expand(view.shape), other, out=view)
        return result

    def _broadcast(self, values: Tensor) -> Iterator[tuple[Segment, list[Tensor]]]:
        """Each tensor's place, and the values of its slots in shapes that broadcast to its own."""
        *parts, nothing = pick(values, self._entries).split([*self._sizes, 1])
        rest = iter(parts)
        for name, segment in self._store.segments.items():
            shaped = []
            for slot in self._slots[name]:
                shape = [1] * len(segment.shape)
                shape[slot.dim] = -1
                shaped.append(next(rest).view(shape))
            yield segment, shaped or [nothing]
