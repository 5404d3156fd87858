"""The compressor in training code of other libraries, which want an optimizer.

`CompressorCallback` is for the Trainer of transformers, and needs that library. The rest is torch
alone.
"""

from typing import TYPE_CHECKING, Any

from gaugelasso.integrations.loss_model import LossModel
from gaugelasso.integrations.optimizer import CompressorOptimizer, CompressorSchedule

if TYPE_CHECKING:
    from gaugelasso.integrations.trainer import CompressorCallback as CompressorCallback

# Without CompressorCallback: `import *` would import transformers.
__all__ = ["CompressorOptimizer", "CompressorSchedule", "LossModel"]


def __getattr__(name: str) -> Any:
    # On use alone: transformers may be missing, and takes seconds to import.
    if name == "CompressorCallback":
        from gaugelasso.integrations.trainer import CompressorCallback

        return CompressorCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
