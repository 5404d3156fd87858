"""Distillation from a teacher: for a pretrained model that is compressed, from what it was.

The text that one trains on is far smaller than what the original has learned from. Its outputs say
more about each token than the one token that follows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso import kernels
from gaugelasso.axes import Compressible, named_tensors
from gaugelasso.compress.pricing import ACCOUNTINGS, total_fma
from gaugelasso.config import Config
from gaugelasso.config.base import BaseModel, Folder
from gaugelasso.errors import UserError
from gaugelasso.runs.units import training_accounting
from gaugelasso.training.evaluation import autocast, in_bfloat16


class Distillation:
    """What is minimised: (1 - share) of the task's loss, and `share` of the distance to a teacher.

    Over tokens that is the cross-entropy to the teacher's probabilities, at the positions that the
    loss counts. Its least value is their entropy, so it is of the size of the loss. Else it is the
    squared error to the teacher's values.
    """

    def __init__(self, teacher: Compressible, over_tokens: bool, config: Config, device: str):
        teacher.eval().requires_grad_(False)
        if config.train.teacher_precision == "bfloat16":
            _check_in_bfloat16(config, device)
            _round_(teacher)  # here, so that the device never holds it in float32
        self._teacher, self._share = teacher.to(device), config.train.distill
        self._over_tokens = over_tokens
        self._config, self._device = config, device
        self.work = forward_work(teacher, config)

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


def forward_work(model: Compressible, config: Config) -> float:
    """Work per token of a forward pass: a third of that of a training step, backward included.

    In FMA where the accounting counts no work.
    """
    counted = ACCOUNTINGS[training_accounting(config.compress.accounting)]
    return total_fma(model.axis_table(), counted, named_tensors(model)) / 3


def _check_in_bfloat16(config: Config, device: str) -> None:
    if not in_bfloat16(config, device):
        raise UserError(
            "train.teacher_precision = 'bfloat16': this run computes in float32, which weights in "
            "bfloat16 do not fit; set train.precision = 'bfloat16', or leave it out"
        )


def _round_(teacher: nn.Module) -> None:
    """Store the maps in bfloat16. Autocast rounds them too, with the gains that they are times.

    Vectors and tables stay as they are: the stream would be in bfloat16 if it began so.
    """
    for name, parameter in teacher.named_parameters():
        if parameter.dim() > 1 and not name.startswith("embedding."):
            parameter.data = parameter.data.bfloat16()


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
