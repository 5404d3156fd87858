"""Cross-entropy of classes."""

import torch.nn.functional as F
from torch import Tensor

from gaugelasso.kernels.dispatch import fused


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over positions of -log softmax(logits)[target]; targets of -100 do not count.

    logits [B, S, classes], targets [B, S]; float32 whatever the logits are.
    """
    if fused(logits):
        from gaugelasso.kernels.gpu.entropy import CrossEntropy

        return CrossEntropy.apply(logits, targets)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
