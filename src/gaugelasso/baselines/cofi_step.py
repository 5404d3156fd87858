"""A training step of CoFi: sampled masks, distillation from the full model, and the constraint."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from gaugelasso.axes import Compressible
from gaugelasso.baselines.cofi_layers import LayerDistillation
from gaugelasso.baselines.cofi_masks import Masks
from gaugelasso.config import Config
from gaugelasso.distributed import Team
from gaugelasso.kernels import reference_kernels
from gaugelasso.models import Transformer
from gaugelasso.training.distillation import forward_work
from gaugelasso.training.evaluation import autocast
from gaugelasso.training.step import TrainingStep

# The temperature at which the outputs of both models are compared.
_TEMPERATURE = 2.0
# The stream of random numbers of the masks; those of data are lower.
_MASKS = 100
# The tensors of the distillation of layers in a checkpoint.
_LAYERS = "layers."


@dataclass(frozen=True)
class CofiDistillation:
    """The loss is (1 - share) of the task's and `share` of the distance to the teacher.

    While there are masks, `layer_weight` times the distance of layers is added.
    `training.distillation`, which is for `train.distill`, has no temperature, and for tokens the
    cross-entropy.
    """

    teacher: Transformer
    share: float
    logits: bool  # whether outputs are logits of classes; else they are values
    layer_weight: float = 0.0

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
        self._taught = forward_work(distillation.teacher, config)
        super().__init__(model, config, device, team, first)
        self._layers: LayerDistillation | None = None
        if distillation.layer_weight:
            self._layers = LayerDistillation(distillation.teacher, config.compress.lr)
        self._held_to = torch.zeros((), device=device)
        self._noise = torch.zeros(len(self.micros), 0, device=device)

    @property
    def extra_work(self) -> float:
        layers = 0.0 if self._layers is None else self._layers.work
        return self._taught + layers

    @property
    def masks(self) -> Masks | None:
        return self._masks

    @masks.setter
    def masks(self, masks: Masks | None) -> None:
        if masks is None:  # the model is dense, and its streams are others
            self._layers = None
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
            if self._layers is not None:
                self._layers.step_()

    def losses(self, inputs: Tensor, targets: Tensor, micro: int) -> tuple[Tensor, Tensor]:
        """The task's loss; and with it the distance to the teacher, and the constraint."""
        with reference_kernels(not self.config.train.fused):
            return self._losses(inputs, targets, micro)

    def _losses(self, inputs: Tensor, targets: Tensor, micro: int) -> tuple[Tensor, Tensor]:
        if self.masks is not None:
            return self._masked_losses(self.masks, inputs, targets, micro)
        with autocast(self.config, self.device):
            outputs = self.model(inputs)
            with torch.no_grad():
                wanted = self.distillation.teacher(inputs)
        return self._with_distance(outputs, wanted, targets)

    def _masked_losses(
        self, masks: Masks, inputs: Tensor, targets: Tensor, micro: int
    ) -> tuple[Tensor, Tensor]:
        model, taught, layers = self.model, self.distillation, self._layers
        assert isinstance(model, Transformer)
        values = masks.sample(self._noise[micro])
        with autocast(self.config, self.device), streams_of(layers, model) as own:
            outputs = functional_call(model, masks.gated(model, values), (inputs,))
            with torch.no_grad(), streams_of(layers, taught.teacher) as theirs:
                wanted = taught.teacher(inputs)
        loss, total = self._with_distance(outputs, wanted, targets)
        if layers is not None:
            total = total + taught.layer_weight * layers.distance(
                own, theirs, layers.is_open(masks, values)
            )
        return loss, total + masks.lagrangian(self._held_to)

    def _with_distance(
        self, outputs: Tensor, wanted: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss, taught = self.config.task.loss(outputs, targets), self.distillation
        return loss, (1 - taught.share) * loss + taught.share * taught.loss(outputs, wanted)

    # --- what a checkpoint keeps ------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        found = super().state_tensors()
        if self._layers is not None:
            found |= {_LAYERS + name: value for name, value in self._layers.state().items()}
        return found

    def load_state_tensors_(self, tensors: dict[str, Tensor], steps: int) -> None:
        own = {name for name in tensors if name.startswith(_LAYERS)}
        rest = {name: value for name, value in tensors.items() if name not in own}
        super().load_state_tensors_(rest, steps)
        if not own:  # of a dense model
            self._layers = None
        elif self._layers is not None:
            self._layers.load_({name.removeprefix(_LAYERS): tensors[name] for name in own})


def streams_of(
    layers: LayerDistillation | None, model: Transformer
) -> AbstractContextManager[list[Tensor]]:
    """The streams after the layers of a forward pass, if they are wanted."""
    return nullcontext([]) if layers is None else layers.watched(model)
