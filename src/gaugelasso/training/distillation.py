"""Distillation from a teacher: for a pretrained model that is compressed, from what it was.

The text that one trains on is far smaller than what the original has learned from. Its outputs say
more about each token than the one token that follows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso import kernels
from gaugelasso.config import Config
from gaugelasso.config.base import BaseModel, Folder
from gaugelasso.training.evaluation import autocast


class Distillation:
    """What is minimised: (1 - share) of the task's loss, and `share` of the distance to a teacher.

    Over tokens that is the cross-entropy to the teacher's probabilities, at the positions that the
    loss counts. Its least value is their entropy, so it is of the size of the loss. Else it is the
    squared error to the teacher's values.
    """

    def __init__(self, teacher: nn.Module, over_tokens: bool, config: Config, device: str):
        self._teacher, self._share = teacher.to(device).eval(), config.train.distill
        self._teacher.requires_grad_(False)
        self._over_tokens = over_tokens
        self._config, self._device = config, device

    def minimised(self, inputs: Tensor, targets: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        """From a batch, the outputs of the model, and the task's loss."""
        with torch.no_grad(), autocast(self._config, self._device):
            wanted = self._teacher(inputs)
        if self._over_tokens:
            # A task of the user's own may have targets of another kind: then all positions count.
            by_position = targets.shape == outputs.shape[:-1]
            given = targets if by_position else None
            distance = kernels.soft_cross_entropy(outputs, wanted, given)
        else:
            distance = F.mse_loss(outputs.float(), wanted.float())
        return (1 - self._share) * loss + self._share * distance


def distillation_of(config: Config, device: str) -> Distillation | None:
    """That of a config, from train.teacher or the model of model.from; None if it has none."""
    model, train = config.model, config.train
    if not train.distill:
        return None
    if train.teacher:
        model = BaseModel(Folder(train.teacher, "train.teacher")).resolved(config.task)
    if not isinstance(model, BaseModel):
        return None
    over_tokens = model.base.spec.input_kind == "tokens"
    return Distillation(model.build(config.task, 0), over_tokens, config, device)
