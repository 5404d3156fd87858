"""The compressor in training code of other libraries, which want an optimizer.

`trainer` is for the Trainer of transformers, and needs that library. The rest is torch alone.
"""

from gaugelasso.integrations.loss_model import LossModel
from gaugelasso.integrations.optimizer import CompressorOptimizer, CompressorSchedule

__all__ = ["CompressorOptimizer", "CompressorSchedule", "LossModel"]
