"""A training step of CoFi: sampled masks, distillation from the full model, and the constraint."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from gaugelasso.axes import Compressible
from gaugelasso.baselines.cofi_masks import Masks
from gaugelasso.config import Config
from gaugelasso.distributed import Team
from gaugelasso.kernels import reference_kernels
from gaugelasso.models import Transformer
from gaugelasso.training.evaluation import autocast
from gaugelasso.training.step import TrainingStep

# The temperature at which the outputs of both models are compared.
_TEMPERATURE = 2.0
# The stream of random numbers of the masks; those of data are lower.
_MASKS = 100


@dataclass(frozen=True)
class CofiDistillation:
    """The loss is (1 - share) of the task's and `share` of the distance to the teacher.

    `training.distillation`, which is for `train.distill`, has no temperature, and for tokens the
    cross-entropy.
    """

    teacher: Transformer
    share: float
    logits: bool  # whether outputs are logits of classes; else they are values

    def loss(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        """KL divergence of softened classes, times the temperature squared; or squared error."""
        if not self.logits:
            return F.mse_loss(outputs.float(), wanted.float())
        soft, t = outputs.float().flatten(0, -2) / _TEMPERATURE, _TEMPERATURE
        target = (wanted.float().flatten(0, -2) / t).log_softmax(-1)
        given = soft.log_softmax(-1)
        return F.kl_div(given, target, log_target=True, reduction="batchmean") * t**2


class CofiStep(TrainingStep):
    """While `masks` is set, the step samples them and moves them towards `target`.

    Its random numbers depend on the seed and on `number`, the step, and nothing else. They and the
    target are copied to fixed tensors before the step, so that a CUDA graph can capture it.
    """

    _masks: Masks | None = None
    target = 0.0
    number = 0

    def __init__(
        self, model: Compressible, config: Config, device: str, team: Team, first: int,
        distillation: CofiDistillation,
    ):  # fmt: skip
        self.distillation = distillation
        super().__init__(model, config, device, team, first)
        self._held_to = torch.zeros((), device=device)
        self._noise = torch.zeros(len(self.micros), 0, device=device)

    @property
    def masks(self) -> Masks | None:
        return self._masks

    @masks.setter
    def masks(self, masks: Masks | None) -> None:
        if masks is self._masks:
            return
        self._masks = masks
        size = 0 if masks is None else len(masks.logits)
        self._noise = self._noise.new_zeros(len(self.micros), size)
        self._step.reset()  # a CUDA graph has the addresses of the masks before

    def load_(self, step: int) -> None:
        super().load_(step)
        self.number = step

    def __call__(self) -> None:
        if self.masks is not None:
            self._fill_(self.masks)
        super().__call__()

    def _fill_(self, masks: Masks) -> None:
        """Set the target and the noise of this step."""
        self._held_to.fill_(self.target)
        draws = [replace(self.draw(self.number, micro), stream=_MASKS) for micro in self.micros]
        noise = torch.stack([masks.noise(draw.seed) for draw in draws])
        if self._noise.is_cuda:  # from other memory the copy would wait for the step before
            noise = noise.pin_memory()
        self._noise.copy_(noise, non_blocking=True)

    def plain(self) -> None:
        super().plain()
        if self.masks is not None:
            self.masks.step_()

    def losses(self, inputs: Tensor, targets: Tensor, micro: int) -> tuple[Tensor, Tensor]:
        """The task's loss; and with it the distance to the teacher, and the constraint."""
        with reference_kernels(not self.config.train.fused):
            return self._losses(inputs, targets, micro)

    def _losses(self, inputs: Tensor, targets: Tensor, micro: int) -> tuple[Tensor, Tensor]:
        taught, masks = self.distillation, self.masks
        with autocast(self.config, self.device):
            if masks is None:
                outputs = self.model(inputs)
            else:
                assert isinstance(self.model, Transformer)
                gated = masks.gated(self.model, masks.sample(self._noise[micro]))
                outputs = functional_call(self.model, gated, (inputs,))
            with torch.no_grad():
                wanted = taught.teacher(inputs)
        loss = self.config.task.loss(outputs, targets)
        total = (1 - taught.share) * loss + taught.share * taught.loss(outputs, wanted)
        return loss, total if masks is None else total + masks.lagrangian(self._held_to)
