"""Shapes: which structures a run may end in.

A free shape is any. A stock shape is that of a known architecture with smaller sizes, which its
engines load: layers stay alike, and every operator reads and writes the whole stream.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gaugelasso.axes import Axis, AxisTable, Tensors
from gaugelasso.compress.harm import restore_levels_
from gaugelasso.errors import UserError

# Weights of a normaliser that differ by less than this share are equal but for rounding.
_EQUAL = 1e-5


@dataclass(frozen=True)
class Stock:
    """What may go in a stock shape, by the kind of axis; and whole layers.

    - equal: kinds of which every layer has one axis; all of these lose equally many indices
    - single: kinds whose indices go one by one
    """

    equal: tuple[str, ...]
    single: tuple[str, ...]


# By the name in `compress.shape`; None: free.
SHAPES: dict[str, Stock | None] = {
    "free": None,
    "llama": Stock(equal=("d_f",), single=("D",)),
}


def check_shape(name: str, table: AxisTable, widths: Mapping[str, int], tensors: Tensors) -> None:
    """UserError unless the model has the shape: layers alike, and the whole stream everywhere."""
    if (shape := SHAPES[name]) is None:
        return
    if not table.layers:
        raise UserError(f"compress.shape = {name!r}: the model declares no layers; use 'free'")
    for kind in shape.equal:
        found = sum(axis.kind == kind for axis in table.axes)
        if found != len(table.layers):
            raise UserError(
                f"compress.shape = {name!r}: {found} of the {len(table.layers)} layers have a "
                f"{kind}; all of them need one, or use 'free'"
            )
    owners = {owner for layer in table.layers for owner in layer}
    first: dict[str, str] = {}
    for axis in table.axes:
        alike = first.setdefault(axis.kind, axis.name)
        if axis.owner in owners and widths[axis.name] != widths[alike]:
            raise UserError(
                f"compress.shape = {name!r}: layers must be alike, and {alike!r} has "
                f"{widths[alike]} indices where {axis.name!r} has {widths[axis.name]}; use 'free'"
            )
        for home in _homes(table, axis) if axis.kind in shape.single else ():
            if widths[home] != widths[axis.name]:
                raise UserError(
                    f"compress.shape = {name!r}: operators must read and write the whole stream of "
                    f"{widths[axis.name]} sites, and {home!r} has {widths[home]}; use 'free'"
                )
    for norm in table.norms:
        weight = tensors[norm.weight]
        if len(weight) and float(weight.max() - weight.min()) > _EQUAL * float(weight.max()):
            raise UserError(
                f"compress.shape = {name!r}: a normaliser must be a plain mean of squares, and the "
                f"weights {norm.weight!r} differ; use 'free'"
            )


def _homes(table: AxisTable, axis: Axis) -> set[str]:
    """The axes of the operators that a site of the stream has positions on."""
    return {table.home(slot) for slot in axis.linked()}


def stock_grain(
    shape: Stock, kind: str, table: AxisTable, multiple: int, preferred: Mapping[str, int]
) -> int:
    """The number that a width of this kind must be a multiple of.

    Products run over the whole stream here, so its width is to be a multiple too.
    """
    names = {axis.name for axis in table.axes if axis.kind == kind}
    if kind in shape.single:
        names |= {home for axis in table.axes if axis.kind == kind for home in _homes(table, axis)}
    return math.lcm(multiple, *(preferred.get(name, 1) for name in names))


def settle_norms_(
    name: str, table: AxisTable, tensors: Tensors, before: Mapping[str, Tensor]
) -> None:
    """After a cut: normalisers have the levels from before, or are plain means of squares.

    In a stock shape all sites of a normaliser have the same weight, as its engines do.
    """
    if SHAPES[name] is None:
        restore_levels_(table, tensors, before)
        return
    for norm in table.norms:
        tensors[norm.weight].fill_(1 / len(tensors[norm.weight]))
