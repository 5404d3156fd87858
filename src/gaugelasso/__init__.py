"""gaugelasso: shrinks a transformer while it trains, down to the loss that you need."""

from gaugelasso import _moved
from gaugelasso.axes import (
    Axis,
    AxisError,
    AxisTable,
    Compressible,
    Cost,
    Norm,
    Operation,
    Size,
    Slot,
)
from gaugelasso.checking import CheckResult, Finding, check
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.compress.events import Drop, Event
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.compress.pricing import ACCOUNTINGS, Accounting
from gaugelasso.compress.recording import register_opener
from gaugelasso.compress.result import Result, TargetMissedWarning
from gaugelasso.errors import UserError
from gaugelasso.importing import import_model
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.training.own_loop import RunRecorder
from gaugelasso.version import __version__

_moved.install()
register_opener(RunRecorder)

__all__ = [
    "ACCOUNTINGS",
    "Accounting",
    "Axis",
    "AxisError",
    "AxisTable",
    "CheckResult",
    "Compressible",
    "Compressor",
    "CompressorOptions",
    "Cost",
    "Drop",
    "Event",
    "Finding",
    "MetricTarget",
    "Norm",
    "Operation",
    "Result",
    "Size",
    "Slot",
    "TargetMissedWarning",
    "Transformer",
    "TransformerSpec",
    "UserError",
    "__version__",
    "check",
    "import_model",
    "load_model",
]
