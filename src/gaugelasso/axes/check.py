"""Checks of an axis table against a model's tensors.

Every dim of every tensor must belong to one axis or be declared fixed, every name must exist, and
every position map must fit. Each error names the tensor or the axis at fault.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from gaugelasso.axes.slots import Axis, AxisError, Slot, Tensors
from gaugelasso.axes.tensors import width

if TYPE_CHECKING:
    from gaugelasso.axes.table import AxisTable


def check(table: "AxisTable", tensors: Tensors) -> None:
    """Raise AxisError unless every dim of every tensor is on one axis or declared fixed."""
    names = [axis.name for axis in table.axes]
    if len(set(names)) != len(names):
        raise AxisError(f"two axes share a name: {sorted(names)}")
    owner_of = _claim_dims(table, tensors)
    _check_sides(table, tensors)
    _check_links(table, tensors, owner_of)
    _check_mentions(table, tensors, names)


def _claim_dims(table: "AxisTable", tensors: Tensors) -> dict[tuple[str, int], str]:
    """(tensor, dim) -> the axis that it belongs to, or "fixed"; AxisError unless there is one."""
    seen: dict[tuple[str, int], str] = {}
    for axis in table.axes:
        if not axis.side_a or not axis.side_b:
            raise AxisError(f"axis {axis.name!r}: both sides need at least one slot")
        if not axis.direct():
            raise AxisError(f"axis {axis.name!r}: no tensor carries its width")
        for slot in axis.slots():
            _check_slot(f"axis {axis.name!r}", slot, tensors)
        for slot in _once(axis):
            _claim(seen, slot, f"axis {axis.name!r}")
        width(axis, tensors)
    for slot in table.fixed:
        _check_slot("fixed", slot, tensors)
        _claim(seen, slot, "fixed")
    for name, tensor in tensors.items():
        for dim in range(tensor.ndim):
            if (name, dim) not in seen:
                raise AxisError(
                    f"tensor {name!r} dim {dim} (size {tensor.shape[dim]}) is on no axis "
                    "and not declared fixed"
                )
    return seen


def _once(axis: Axis) -> list[Slot]:
    """The direct slots. A tensor on both sides of an axis (tied weights) is there once."""
    on_a = {(slot.tensor, slot.dim) for slot in axis.side_a}
    tied = [slot for slot in axis.side_b if (slot.tensor, slot.dim) in on_a]
    if tied and axis.gauge:
        raise AxisError(
            f"axis {axis.name!r}: {tied[0].tensor!r} is on both sides, so that neither side can be "
            "multiplied alone: declare the axis with gauge=False"
        )
    rest = tuple(slot for slot in axis.side_b if (slot.tensor, slot.dim) not in on_a)
    return [slot for slot in axis.side_a + rest + axis.riders if slot.link is None]


def _check_sides(table: "AxisTable", tensors: Tensors) -> None:
    penalised: dict[str, int] = {}
    for axis in table.axes:
        for slot in axis.side_a + axis.side_b:
            if not isinstance(tensors[slot.tensor], nn.Parameter):
                raise AxisError(
                    f"axis {axis.name!r}: {slot.tensor!r} is a buffer, it cannot be penalised"
                )
            penalised[slot.tensor] = penalised.get(slot.tensor, 0) + 1
    for name, number in penalised.items():
        if number > 2:
            raise AxisError(f"tensor {name!r} is penalised on {number} axes, at most 2")


def _check_links(
    table: "AxisTable", tensors: Tensors, owner_of: Mapping[tuple[str, int], str]
) -> None:
    for axis in table.axes:
        for slot in axis.slots():
            if slot.link is None:
                continue
            home = owner_of[slot.tensor, slot.dim]
            if home == "fixed":
                raise AxisError(f"axis {axis.name!r}: {slot.tensor!r} cannot shrink, it is fixed")
            _check_link(axis, slot, tensors)
            if owner_of[slot.link, 0] != home:
                raise AxisError(
                    f"axis {axis.name!r}: {slot.link!r} does not shrink with {slot.tensor!r}"
                )


def _check_mentions(table: "AxisTable", tensors: Tensors, names: list[str]) -> None:
    for name, rows in table.matrices.items():
        if name not in tensors:
            raise AxisError(f"matrices: the model has no tensor {name!r}")
        if not 0 < rows < tensors[name].ndim:
            raise AxisError(f"matrices: {name!r} has {tensors[name].ndim} dims, {rows} as rows")
    for name in table.lookups:
        if name not in tensors:
            raise AxisError(f"lookups: the model has no tensor {name!r}")
        if not isinstance(tensors[name], nn.Parameter) or tensors[name].ndim < 2:
            raise AxisError(f"lookups: {name!r} is not a trained table of rows")
        if name in table.matrices:
            raise AxisError(f"lookups: {name!r} is in matrices too; a matrix is stepped as a whole")
    for norm in table.norms:
        for name in (norm.gain, norm.weight, norm.energy):
            if name not in tensors:
                raise AxisError(f"norms: the model has no tensor {name!r}")
    for owner in table.required - table.owners().keys():
        raise AxisError(f"required: no axis is owned by {owner!r}")
    for owner in {owner for layer in table.layers for owner in layer} - table.owners().keys():
        raise AxisError(f"layers: no axis is owned by {owner!r}")
    for cost in table.costs:
        for axis_name in cost.axes:
            if axis_name not in names:
                raise AxisError(f"cost {cost.kind!r} names the unknown axis {axis_name!r}")
    for operation in table.operations:
        for axis_name in operation.axes:
            if axis_name not in names:
                raise AxisError(
                    f"operation {operation.kind!r} names the unknown axis {axis_name!r}"
                )


def _check_slot(where: str, slot: Slot, tensors: Tensors) -> None:
    for name in (slot.tensor, slot.link):
        if name is not None and name not in tensors:
            raise AxisError(f"{where}: the model has no tensor {name!r}")
    if not 0 <= slot.dim < tensors[slot.tensor].ndim:
        shape = tuple(tensors[slot.tensor].shape)
        raise AxisError(f"{where}: tensor {slot.tensor!r} {shape} has no dim {slot.dim}")


def _check_link(axis: Axis, slot: Slot, tensors: Tensors) -> None:
    assert slot.link is not None
    link = tensors[slot.link]
    length = tensors[slot.tensor].shape[slot.dim]
    if link.shape != (length,):
        raise AxisError(
            f"axis {axis.name!r}: {slot.link!r} has shape {tuple(link.shape)}, "
            f"{slot.tensor!r} needs ({length},)"
        )
    size = width(axis, tensors)
    if length and (int(link.min()) < 0 or int(link.max()) >= size):
        raise AxisError(f"axis {axis.name!r}: {slot.link!r} points outside 0..{size - 1}")
    if torch.unique(link).numel() != length:
        raise AxisError(f"axis {axis.name!r}: {slot.link!r} names an index twice")


def _claim(seen: dict[tuple[str, int], str], slot: Slot, who: str) -> None:
    key = (slot.tensor, slot.dim)
    if key in seen:
        raise AxisError(
            f"tensor {slot.tensor!r} dim {slot.dim} is claimed by {seen[key]} and {who}"
        )
    seen[key] = who
