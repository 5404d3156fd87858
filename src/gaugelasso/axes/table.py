"""The axis table: which dims of which tensors form one removable index.

Penalty, price, balance, drop, surgery, checkpoint and report are generic over this table. The
model declares it; nothing is traced. `AxisTable.check` accounts for every dim of every tensor.
Knows nothing of losses, training or particular architectures.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from torch import nn

from gaugelasso.axes.check import check
from gaugelasso.axes.slots import (
    Axis,
    AxisError,
    Cost,
    Norm,
    Operation,
    Slot,
    Tensors,
    check_tuple,
)
from gaugelasso.axes.tensors import width


@dataclass(frozen=True)
class AxisTable:
    """A model's whole declaration.

    - `fixed`: the dims that never shrink
    - `matrices`: tensor name -> the number of its leading dims that are the rows of the linear
      map; tensors not listed are vectors or look-up tables
    - `required`: the owners that may never be removed
    - `context`: the sequence length at inference, and the mean number of keys that a query sees
    - `operations`: what the model does when it is served, for prices in milliseconds
    - `lookups`: tables of which a batch uses some rows, which are their first dim: a row without a
      gradient gets no penalty in that step
    - `layers`: the owners of each layer, for a shape in which layers stay alike
    """

    axes: tuple[Axis, ...]
    fixed: tuple[Slot, ...] = ()
    matrices: Mapping[str, int] = field(default_factory=dict)
    norms: tuple[Norm, ...] = ()
    costs: tuple[Cost, ...] = ()
    required: frozenset[str] = frozenset()
    context: tuple[int, float] = (1, 1.0)
    operations: tuple[Operation, ...] = ()
    lookups: tuple[str, ...] = ()
    layers: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        parts = {
            "axes": Axis,
            "fixed": Slot,
            "lookups": str,
            "norms": Norm,
            "costs": Cost,
            "operations": Operation,
        }
        for name, kind in parts.items():
            check_tuple(name, getattr(self, name), kind)
        if isinstance(self.required, str):
            raise AxisError(f"required = {self.required!r} is a string; write a set of owners")

    def __getitem__(self, name: str) -> Axis:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Axis]:
        return {axis.name: axis for axis in self.axes}

    def owners(self) -> dict[str, tuple[str, ...]]:
        """Operator name -> the names of its axes."""
        owned: dict[str, tuple[str, ...]] = {}
        for axis in self.axes:
            if axis.owner is not None:
                owned[axis.owner] = (*owned.get(axis.owner, ()), axis.name)
        return owned

    def home(self, slot: Slot) -> str:
        """The axis whose indices are the positions of this tensor's dim."""
        return self._homes[slot.tensor, slot.dim]

    @cached_property
    def _homes(self) -> dict[tuple[str, int], str]:
        return {(s.tensor, s.dim): axis.name for axis in self.axes for s in axis.direct()}

    def uses(self, axis: Axis) -> dict[str, list[Slot]]:
        """Home axis -> its slots on a linked axis: several where a tied table is used twice."""
        found: dict[str, list[Slot]] = {}
        for slot in axis.linked():
            found.setdefault(self.home(slot), []).append(slot)
        return found

    def links(self) -> list[str]:
        """The names of the position maps, each once."""
        return list(dict.fromkeys(str(s.link) for axis in self.axes for s in axis.linked()))

    def widths(self, tensors: Tensors) -> dict[str, int]:
        """Axis name -> number of indices, read off the shapes."""
        return {axis.name: width(axis, tensors) for axis in self.axes}

    def check(self, tensors: Tensors) -> None:
        """Raise AxisError unless every dim of every tensor is on one axis or declared fixed."""
        check(self, tensors)


class Compressible(nn.Module):
    """A model that can be compressed: it declares its axis table and can remove an operator."""

    @property
    def is_pretrained(self) -> bool:
        """Whether compression treats its weights as pretrained ones."""
        return False

    def axis_table(self) -> AxisTable:
        """The table for the model as it is now; called again after every structural change."""
        raise NotImplementedError

    def remove_operator(self, name: str) -> None:
        """Remove the operator that axes of the table name as their owner.

        A cut may be undone. Modules, parameters and buffers are then restored, and nothing else.
        """
        raise NotImplementedError

    def structure(self) -> dict:
        """A JSON-ready description from which the same shapes can be built."""
        raise NotImplementedError

    @classmethod
    def from_structure(cls, structure: dict[str, Any]) -> Self:
        """A model with the shapes that `structure()` described; its weights are replaced.

        The default calls the class with the keys of the structure as arguments.
        """
        return cls(**structure)

    def counts(self) -> dict[str, int]:
        """Numbers of parts, by name, for the rows of a run's log; none by default."""
        return {}
