"""gaugelasso: train a transformer, name the loss you need, keep the smallest that holds it."""

from gaugelasso.axes import Axis, AxisError, AxisTable, Compressible, Cost, Norm, Slot
from gaugelasso.checkpoint import load_model
from gaugelasso.compressor import Compressor
from gaugelasso.errors import UserError
from gaugelasso.events import Drop, Event
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.options import CompressorOptions
from gaugelasso.pricing import ACCOUNTINGS, Accounting
from gaugelasso.version import __version__

__all__ = [
    "ACCOUNTINGS",
    "Accounting",
    "Axis",
    "AxisError",
    "AxisTable",
    "Compressible",
    "Compressor",
    "CompressorOptions",
    "Cost",
    "Drop",
    "Event",
    "Norm",
    "Slot",
    "Transformer",
    "TransformerSpec",
    "UserError",
    "__version__",
    "load_model",
]
