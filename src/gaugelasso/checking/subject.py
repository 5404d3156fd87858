"""The model under check: copies of it in float64, its batch, and how it is called."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso.axes import AxisTable, Compressible, Slot, Tensors, named_tensors, spread, width

Loss = Callable[[Any, Any], Tensor]
Keeps = dict[str, Tensor]
# Relative to the largest output. Products in float64 differ by 1e-13 or so.
TOLERANCE = 1e-9


def default_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy for integer targets, else the mean square."""
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


class Subject:
    """A model, its batch and its loss. `model` itself is never changed."""

    def __init__(self, model: Compressible, batch: tuple[Any, Any], loss: Loss):
        self.model, self.loss = model, loss
        self.inputs, self.targets = batch

    def exact(self) -> Compressible:
        """A copy in float64 and eval mode, with random values where all are equal.

        A bias of zeros or a gain of ones would hide a wrong power.
        """
        model = copy.deepcopy(self.model).double().eval()
        generator = torch.Generator().manual_seed(0)
        table = model.axis_table()
        slow = {name for norm in table.norms for name in (norm.weight, norm.energy)}
        for name, tensor in named_tensors(model).items():
            if tensor.is_floating_point() and tensor.numel():
                rough = 0.5 + torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
                rough = rough.to(tensor.device)
                if name in slow:
                    tensor.mul_(rough)
                elif isinstance(tensor, nn.Parameter) and bool(
                    (tensor == tensor.view(-1)[0]).all()
                ):
                    tensor.data.add_(rough - 0.75)
        return model

    def output(self, model: nn.Module) -> Tensor:
        """The model's answer to the batch, as one vector."""
        return flat(call(model, self.inputs, torch.float64))


def call(model: nn.Module, inputs: Any, dtype: torch.dtype) -> Any:
    """model(inputs), with floating inputs in this dtype; model(*inputs) for a tuple."""
    cast = tuple(
        each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in (inputs if isinstance(inputs, tuple) else (inputs,))
    )
    return model(*cast)


def flat(outputs: Any) -> Tensor:
    """Every tensor of an output, as one vector."""
    if isinstance(outputs, Tensor):
        return outputs.detach().reshape(-1)
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    return torch.cat([flat(each) for each in outputs])


def difference(new: Tensor, old: Tensor) -> float:
    """The largest deviation, relative to the largest value."""
    if new.shape != old.shape:
        return float("inf")
    return float((new - old).abs().max() / old.abs().max().clamp(min=1e-300))


@torch.no_grad()
def scale_(slot: Slot, factor: Tensor, power: int, tensors: Tensors) -> None:
    """Multiply a slot's tensor by factor**power along its dim."""
    tensor = tensors[slot.tensor].detach()
    tensor.mul_(spread(factor.to(tensor) ** power, slot, tensors))


def all_kept(table: AxisTable, tensors: Tensors) -> Keeps:
    return {a.name: torch.ones(width(a, tensors), dtype=torch.bool) for a in table.axes}


@torch.no_grad()
def silence_(table: AxisTable, tensors: Tensors, name: str, keep: Tensor) -> None:
    """Zero the dropped indices of an axis: both sides, and their share of slow normalisers."""
    axis, shares = table[name], {norm.weight for norm in table.norms}
    riders = tuple(slot for slot in axis.riders if slot.tensor in shares)
    for slot in (*axis.side_a, *axis.side_b, *riders):
        tensor = tensors[slot.tensor].detach()
        tensor.mul_(spread(keep.to(tensor), slot, tensors))


def describe(slot: Slot) -> str:
    link = f", link={slot.link!r}" if slot.link else ""
    return f"Slot({slot.tensor!r}, {slot.dim}{link})"


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
