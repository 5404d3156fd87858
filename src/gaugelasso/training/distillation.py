"""Distillation from the original: a pretrained model that is compressed stays close to itself.

The text that one trains on is far smaller than what the original has learned from. Its outputs say
more about each token than the one token that follows.
"""

import torch
from torch import Tensor, nn

from gaugelasso.config import Config
from gaugelasso.config.base import BaseModel
from gaugelasso.training.evaluation import autocast


class Distillation:
    """What is minimised: (1 - share) of the task's loss, and `share` of that to the original.

    The second is the cross-entropy to the original's probabilities. Its least value is their
    entropy, so it is of the size of the first.
    """

    def __init__(self, original: nn.Module, share: float, config: Config, device: str):
        self._original, self._share = original.to(device).eval().requires_grad_(False), share
        self._config, self._device = config, device

    def minimised(self, inputs: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        """From a batch, the outputs of the model, and the task's loss."""
        with torch.no_grad(), autocast(self._config, self._device):
            wanted = self._original(inputs).float().softmax(-1)
        distance = -(wanted * outputs.float().log_softmax(-1)).sum(-1).mean()
        return (1 - self._share) * loss + self._share * distance


def distillation_of(config: Config, device: str) -> Distillation | None:
    """That of a config, from the model of model.from; None if it has none."""
    share = config.train.distill
    if not share or not isinstance(config.model, BaseModel):
        return None
    return Distillation(config.model.build(config.task, 0), share, config, device)
