"""Shapes: which structures a run may end in.

A free shape is any. A stock shape is that of a known architecture with smaller sizes, which its
engines load: layers stay alike, and every operator reads and writes the whole stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gaugelasso.axes import AxisTable, Tensors
from gaugelasso.compress.harm import restore_levels_
from gaugelasso.errors import UserError


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


def check_shape(name: str, table: AxisTable, widths: Mapping[str, int]) -> None:
    """UserError unless the model has the shape, as far as widths say."""
    if (shape := SHAPES[name]) is None:
        return
    if not table.layers:
        raise UserError(f"compress.shape = {name!r}: the model declares no layers; use 'free'")
    for kind in shape.equal:
        found = {axis.name: widths[axis.name] for axis in table.axes if axis.kind == kind}
        if len(found) != len(table.layers):
            raise UserError(
                f"compress.shape = {name!r}: {len(found)} of the {len(table.layers)} layers have a "
                f"{kind}; all of them need one, or use 'free'"
            )
        first = next(iter(found))
        for other, size in found.items():
            if size != found[first]:
                raise UserError(
                    f"compress.shape = {name!r}: layers must be alike, and {first!r} has "
                    f"{found[first]} indices where {other!r} has {size}; use 'free'"
                )


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
