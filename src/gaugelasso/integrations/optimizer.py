"""The compressor as a `torch.optim.Optimizer`, for loops that call `optimizer.step()`.

Such a loop names no loss when it steps, so a forward hook notes the loss and the batch. A cut
replaces parameters, so the parameter groups are filled anew after each step. Refuses what would
skip steps behind the compressor's back or keep old parameters: gradient scalers, several
processes, groups of other parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.events import Event
from gaugelasso.errors import UserError
from gaugelasso.integrations.loss_model import check_parts, loss_of

# The Trainer passes it to models that divide a sum over the micro-batch by it.
_ITEMS = "num_items_in_batch"


class _Pass(NamedTuple):
    """A forward pass since the last step: the batch, and its loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Tensor


class CompressorOptimizer(torch.optim.Optimizer):
    """Steps `compressor`; `model` returns the loss, and contains the compressor's model.

    `model` is a `LossModel`, or the compressor's own model where that returns a loss: a scalar
    tensor, the first element of a tuple, or the key `loss` of a dict. The loss of a step is the
    mean over the forward passes in training mode since the step before (gradient accumulation),
    or their sum where the passes are given `num_items_in_batch`. At events these batches are the
    compressor's probe, unless it has one.

    The compressor sets the learning rate. It is `lr` of the only parameter group, to be read.
    """

    def __init__(self, compressor: Compressor, model: nn.Module):
        check_parts(model, compressor.model)
        self.compressor, self.model = compressor, model
        # What the last step led to, if it held a structural event.
        self.event: Event | None = None
        self._passes: list[_Pass] = []
        super().__init__(list(model.parameters()), {"lr": compressor.options.lr})
        model.register_forward_hook(self._note, with_kwargs=True)
        if compressor.probe is None:
            compressor.probe = self._probe

    def step(self, closure: Callable[[], Any] | None = None) -> Tensor:  # type: ignore[override]
        """Take a step along the gradients that `backward` has left; the mean loss of its batches.

        A `closure` runs the forward and the backward pass first, as for any optimizer.
        """
        _check_alone()
        if closure is not None:
            self.zero_grad()
            with torch.enable_grad():
                closure()
        if not self._passes:
            raise UserError(
                f"the {type(self.model).__name__} has returned no loss since the last step; it "
                "must return the loss in training mode (see LossModel), and a loss that is "
                "computed outside of it is not seen"
            )
        loss = self._joined([each.loss for each in self._passes])
        try:
            self.event = self.compressor.step(loss)
        finally:
            self._passes.clear()
        self.refresh_()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients, and the losses that they belong to."""
        self._passes.clear()
        super().zero_grad(set_to_none)

    def refresh_(self) -> None:
        """Take the parameters that the model has now, and the rate of the last step."""
        (group,) = self.param_groups
        group["params"] = list(self.model.parameters())
        group["lr"] = self.rate

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return float(self.compressor.scalars.lr)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """UserError: the compressor trains its model, all of it and nothing else."""
        if self.param_groups:
            raise UserError(
                "add_param_group: the compressor trains all parameters of its model with one "
                "rate, and no others; make them a part of the model"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """UserError unless it is empty, as `state_dict` is: the compressor has the state.

        Accelerate loads what it has just read, to move it to a device.
        """
        if state_dict["state"]:
            raise UserError(
                "load_state_dict, or resume_from_checkpoint: the state of another optimizer; a "
                "compressor resumes by Compressor(..., record=FOLDER, resume=True)"
            )
        super().load_state_dict(state_dict)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # A GradScaler asks this before a step, and nobody else does.
        raise UserError(
            "a GradScaler (fp16) skips steps that the compressor counts; use bf16, or float32"
        )

    # --- losses -----------------------------------------------------------------------------

    def _note(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        if not model.training or not torch.is_grad_enabled():
            return
        loss = loss_of(outputs)
        if loss is not None and loss.requires_grad:
            self._passes.append(_Pass(args, kwargs, loss.detach().reshape(())))

    def _probe(self) -> float:
        """The loss of the step's batches, with the model as it is now."""
        losses = [loss_of(self.model(*each.args, **each.kwargs)) for each in self._passes]
        return float(self._joined([loss for loss in losses if loss is not None]))

    def _joined(self, losses: list[Tensor]) -> Tensor:
        total = torch.stack([loss.reshape(()).float() for loss in losses]).sum()
        summed = any(each.kwargs.get(_ITEMS) is not None for each in self._passes)
        return total if summed else total / len(losses)


class CompressorSchedule(LRScheduler):
    """Says which learning rate the compressor has set, where a loop wants a scheduler."""

    def __init__(self, optimizer: CompressorOptimizer):
        self._source = optimizer
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [self._source.rate]

    def get_last_lr(self) -> list[float]:  # type: ignore[override]
        return [self._source.rate]

    def state_dict(self) -> dict[str, Any]:
        """Empty: the course of the compressor has the state."""
        return {}


def _check_alone() -> None:
    """UserError in one of several processes: what averages gradients keeps old parameters."""
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        raise UserError(
            f"one of {group.get_world_size()} processes: CompressorOptimizer works in one "
            "process, because DistributedDataParallel keeps the parameters from before a cut; "
            "use a loop of your own with Compressor(..., team=...)"
        )
