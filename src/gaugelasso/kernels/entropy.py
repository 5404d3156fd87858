"""Cross-entropy of classes: to one class, or to the probabilities of a teacher."""

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


def soft_cross_entropy(logits: Tensor, teacher: Tensor, targets: Tensor | None = None) -> Tensor:
    """Mean over positions of -sum over classes of softmax(teacher) log softmax(logits).

    Both [B, S, classes]; the result is float32, and the teacher gets no gradient. Positions whose
    target [B, S] is NO_TARGET are ignored.
    """
    if logits.shape != teacher.shape:
        shapes = f"{tuple(logits.shape)} and {tuple(teacher.shape)}"
        raise ValueError(f"logits and those of the teacher have the shapes {shapes}")
    if fused(logits):
        from gaugelasso.kernels.gpu.entropy import SoftCrossEntropy

        return SoftCrossEntropy.apply(logits, teacher, targets)
    chances = teacher.detach().float().softmax(-1)
    # A class that the teacher excludes counts nothing, also where the logits exclude it too.
    logs = logits.float().log_softmax(-1).masked_fill(chances == 0, 0.0)
    losses = -(chances * logs).sum(-1)
    if targets is None:
        return losses.mean()
    ignored = targets == NO_TARGET
    # Not by selection, whose size the host would wait for. With all targets, times exactly one.
    return losses.masked_fill(ignored, 0.0).mean() * (losses.numel() / (~ignored).sum())
