"""Cross-entropy of classes."""

import torch.nn.functional as F
from torch import Tensor

from gaugelasso.kernels.dispatch import NO_TARGET, fused


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over positions of -log softmax(logits)[target]; targets of NO_TARGET are ignored.

    logits [B, S, classes], targets [B, S]; the result is float32 for logits of any dtype.
    """
    if fused(logits):
        from gaugelasso.kernels.gpu.entropy import CrossEntropy

        return CrossEntropy.apply(logits, targets)
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, targets.flatten(), ignore_index=NO_TARGET)
