"""Surgery: cut kept indices out of weights, riders and optimizer state.

Applies keep-sets that somebody else decided; every tensor stays dense. Knows
nothing of why an index goes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gaugelasso.axes import AxisTable, Compressible, Tensors, named_tensors, width
from gaugelasso.compress.flat import FlatStore, replace_tensor

# Axis name -> bool per index, on the CPU. Axes not named are kept whole.
Keeps = Mapping[str, Tensor]


def kept_elements(store: FlatStore, table: AxisTable, keeps: Keeps, alive: set[str]) -> Tensor:
    """The flat positions that survive in the `alive` tensors, in the new layout's order.

    One vector cuts weights, momentum and any other state of the parameters' shape,
    which is why a cut and an elementwise optimizer step commute.
    """
    device = store.weight.device
    dims = _kept_dims(table, keeps, device)
    parts = [torch.empty(0, dtype=torch.long, device=device)]
    for name, segment in store.segments.items():
        if name in alive:
            index = torch.arange(segment.start, segment.end, device=device).view(segment.shape)
            parts.append(_select(index, name, dims).reshape(-1))
    return torch.cat(parts)


def cut(tensors: Tensors, table: AxisTable, keeps: Keeps) -> dict[str, Tensor]:
    """Every parameter and buffer after the cut, as tensors of their own: nothing is touched."""
    dims = _kept_dims(table, keeps, next(iter(tensors.values())).device)
    result = _new_links(table, keeps, dims, tensors)
    for name in tensors.keys() - result.keys():
        old = tensors[name].detach()
        new = _select(old, name, dims)
        result[name] = old.clone() if new is old else new
    return result


def swap_(model: Compressible, tensors: Tensors, removed: tuple[str, ...] = ()) -> None:
    """Take the removed operators out, and put these tensors in the place of the others.

    Whoever keeps flat storage builds it anew afterwards.
    """
    for operator in removed:
        model.remove_operator(operator)
    for name, old in named_tensors(model).items():
        new = tensors[name]
        replace_tensor(model, name, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)


def snapshot_modules(model: nn.Module) -> Callable[[], None]:
    """Remember which modules, parameters and buffers a model has; the result puts them back.

    Holds them without a copy, so it serves where others are put in their place, as in `swap_`.
    """
    registers: list[dict[str, Any]] = []
    for part in model.modules():
        registers += part._modules, part._parameters, part._buffers
    held = [dict(register) for register in registers]

    def put_back() -> None:
        for register, entries in zip(registers, held, strict=True):
            register.clear()  # for the order too: state lies in that of the parameters
            register.update(entries)

    return put_back


def cut_(
    model: Compressible, table: AxisTable, keeps: Keeps, removed: tuple[str, ...] = ()
) -> None:
    """Cut every parameter and buffer of the model and take the removed operators out."""
    swap_(model, cut(named_tensors(model), table, keeps), removed)


def _kept_dims(
    table: AxisTable, keeps: Keeps, device: torch.device
) -> dict[tuple[str, int], Tensor]:
    """(tensor, dim) -> the positions that stay, for the dims that lose any."""
    cut = {name: keep.nonzero().squeeze(1) for name, keep in keeps.items() if not bool(keep.all())}
    if not cut:
        return {}
    # One transfer for all axes: each would wait for the device.
    kept = torch.cat(list(cut.values())).to(device).split([len(index) for index in cut.values()])
    return {
        (slot.tensor, slot.dim): index
        for name, index in zip(cut, kept, strict=True)
        for slot in table[name].direct()
    }


def _select(tensor: Tensor, name: str, dims: Mapping[tuple[str, int], Tensor]) -> Tensor:
    for dim in range(tensor.ndim):
        index = dims.get((name, dim))
        if index is not None:
            tensor = tensor.index_select(dim, index)
    return tensor


def _new_links(
    table: AxisTable,
    keeps: Keeps,
    dims: Mapping[tuple[str, int], Tensor],
    tensors: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Position maps after the cut: fewer positions, indices numbered anew."""
    links: dict[str, Tensor] = {}
    for axis in table.axes:
        if not axis.linked():
            continue
        keep = keeps.get(axis.name, torch.ones(width(axis, tensors), dtype=torch.bool))
        number = (keep.long().cumsum(0) - 1).to(tensors[str(axis.linked()[0].link)].device)
        for slot in axis.linked():
            link = str(slot.link)
            links[link] = number[_select(tensors[link], link, dims)]
    return links
