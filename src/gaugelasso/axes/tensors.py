"""Tensors by name, and what an axis reads off their shapes."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gaugelasso.axes.slots import Axis, AxisError, Slot, Tensors


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a model by its qualified name."""
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    seen: set[int] = set()
    # As `named_parameters` and `named_buffers`, which would each walk through all modules.
    for prefix, module in model.named_modules():
        for found, own in ((parameters, module._parameters), (buffers, module._buffers)):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{prefix}.{name}" if prefix else name] = tensor
    return parameters | buffers


def on_host(tensors: Tensors, names: Iterable[str]) -> dict[str, Tensor]:
    """CPU copies of some tensors of one dtype, in one transfer: each waits for the device."""
    chosen = {name: tensors[name].detach() for name in names}
    if not chosen:
        return {}
    flat = torch.cat([tensor.reshape(-1) for tensor in chosen.values()]).cpu()
    parts = flat.split([tensor.numel() for tensor in chosen.values()])
    return {name: part.view(chosen[name].shape) for name, part in zip(chosen, parts, strict=True)}


def width(axis: Axis, tensors: Tensors) -> int:
    """The number of indices of an axis; AxisError if its direct slots have different sizes."""
    sizes = {slot.tensor: tensors[slot.tensor].shape[slot.dim] for slot in axis.direct()}
    if len(set(sizes.values())) != 1:
        raise AxisError(f"axis {axis.name!r}: its tensors disagree on the width: {sizes}")
    return next(iter(sizes.values()))


def spread(values: Tensor, slot: Slot, tensors: Tensors) -> Tensor:
    """Per-index values along the slot's dim, in a shape that broadcasts over its tensor."""
    if slot.link is not None:
        values = values[tensors[slot.link]]
    shape = [1] * tensors[slot.tensor].ndim
    shape[slot.dim] = -1
    return values.reshape(shape)
