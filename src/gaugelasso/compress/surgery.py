"""Surgery: remove indices from weights, riders and optimizer state.

Applies keep-sets; every tensor stays dense. Knows nothing of why an index is removed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gaugelasso.axes import AxisTable, Compressible, Tensors, named_tensors, width
from gaugelasso.compress.flat import FlatStore, replace_tensor, tensor_places
from gaugelasso.errors import UserError

# Axis name -> bool per index, on the CPU. Axes not named keep all indices.
Keeps = Mapping[str, Tensor]


def kept_elements(store: FlatStore, table: AxisTable, keeps: Keeps, alive: set[str]) -> Tensor:
    """The flat positions that stay, of the `alive` tensors, in the order of the new layout.

    One vector cuts weights, momentum and any other state of the parameters' shape. This is why a
    cut and an elementwise optimizer step commute.
    """
    kind: Any = {"device": store.weight.device}
    # Half the memory, where it is enough.
    kind["dtype"] = torch.int32 if len(store) < 2**31 else torch.long
    dims = _kept_dims(table, keeps, store.weight.device)
    # Filled tensor by tensor, so that there are no parts beside the whole.
    kept, end = torch.empty(len(store), **kind), 0
    for name, segment in store.segments.items():
        if name in alive:
            index = torch.arange(segment.start, segment.end, **kind).view(segment.shape)
            index = _select(index, name, dims).reshape(-1)
            kept[end : end + len(index)] = index
            end += len(index)
    return kept[:end]


def cut(tensors: Tensors, table: AxisTable, keeps: Keeps) -> dict[str, Tensor]:
    """Every parameter and buffer after the cut, as new tensors; the model does not change."""
    dims = _kept_dims(table, keeps, next(iter(tensors.values())).device)
    result = _new_links(table, keeps, dims, tensors)
    for name in tensors.keys() - result.keys():
        old = tensors[name].detach()
        new = _select(old, name, dims)
        result[name] = old.clone() if new is old else new
    return result


def swap_(model: Compressible, tensors: Tensors, removed: tuple[str, ...] = ()) -> None:
    """Remove operators, and replace all tensors of the model by these.

    Flat storage must be built again afterwards.
    """
    for operator in removed:
        model.remove_operator(operator)
    places = tensor_places(model)
    for name, old in named_tensors(model).items():
        if name not in tensors:
            raise UserError(
                f"tensor {name!r} is tied to a tensor of an operator that was removed; register "
                "it in a module that stays, before the operator"
            )
        new = tensors[name]
        new = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
        replace_tensor(places, name, new)


def snapshot_modules(model: nn.Module) -> Callable[[], None]:
    """Keep references to a model's modules, parameters and buffers; the result restores them.

    Copies no values, so it undoes replacements such as `swap_`, not changes in place.
    """
    registers: list[dict[str, Any]] = []
    for part in model.modules():
        registers += part._modules, part._parameters, part._buffers
    saved = [dict(register) for register in registers]

    def restore() -> None:
        for register, entries in zip(registers, saved, strict=True):
            register.clear()  # restores the order too, which flat storage depends on
            register.update(entries)

    return restore


def cut_(
    model: Compressible, table: AxisTable, keeps: Keeps, removed: tuple[str, ...] = ()
) -> None:
    """Cut every parameter and buffer of the model, and remove operators."""
    swap_(model, cut(named_tensors(model), table, keeps), removed)


def _kept_dims(
    table: AxisTable, keeps: Keeps, device: torch.device
) -> dict[tuple[str, int], Tensor]:
    """(tensor, dim) -> the positions that stay, for the dims that lose positions."""
    cut = {name: keep.nonzero().squeeze(1) for name, keep in keeps.items() if not bool(keep.all())}
    if not cut:
        return {}
    # One transfer for all axes: each transfer waits for the device.
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
    """Position maps after the cut: fewer positions, indices renumbered."""
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
