"""The axis table: a model's declaration of what can be removed from it.

Everything else is generic over it. Imports nothing of this package but its errors.
"""

from gaugelasso.axes.slots import (
    Axis,
    AxisError,
    Cost,
    Growth,
    Norm,
    Operation,
    Side,
    Size,
    Slot,
    Tensors,
)
from gaugelasso.axes.table import AxisTable, Compressible
from gaugelasso.axes.tensors import named_tensors, on_host, spread, width

__all__ = [
    "Axis",
    "AxisError",
    "AxisTable",
    "Compressible",
    "Cost",
    "Growth",
    "Norm",
    "Operation",
    "Side",
    "Size",
    "Slot",
    "Tensors",
    "named_tensors",
    "on_host",
    "spread",
    "width",
]
