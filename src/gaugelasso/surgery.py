"""Surgery: cut kept indices out of weights, riders and optimizer state.

Applies keep-sets that somebody else decided; every tensor stays dense. Knows
nothing of why an index goes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gaugelasso.axes import AxisTable, Compressible, named_tensors
from gaugelasso.storage import FlatStore, replace_tensor

# Axis name -> bool per index, on the CPU. Axes not named are kept whole.
Keeps = Mapping[str, Tensor]


def kept_elements(store: FlatStore, table: AxisTable, keeps: Keeps, alive: set[str]) -> Tensor:
    """The flat positions that survive in the `alive` tensors, in the new layout's order.

    One vector cuts weights, momentum and any other state of the parameters' shape,
    which is why a cut and an elementwise optimizer step commute.
    """
    dims = _kept_dims(table, keeps)
    device = store.weight.device
    parts = [torch.empty(0, dtype=torch.long, device=device)]
    for name, segment in store.segments.items():
        if name in alive:
            index = torch.arange(segment.start, segment.end, device=device).view(segment.shape)
            parts.append(_select(index, name, dims).reshape(-1))
    return torch.cat(parts)


def cut_(
    model: Compressible, table: AxisTable, keeps: Keeps, removed: tuple[str, ...] = ()
) -> None:
    """Cut every parameter and buffer of the model and take the removed operators out.

    Parameters become fresh, independent tensors; whoever keeps flat storage builds
    it anew afterwards.
    """
    dims = _kept_dims(table, keeps)
    links = _new_links(table, keeps, dims, named_tensors(model))
    for operator in removed:
        model.remove_operator(operator)
    for name, tensor in named_tensors(model).items():
        if name in links:
            replace_tensor(model, name, links[name])
            continue
        new = _select(tensor.detach(), name, dims).clone()
        replace_tensor(model, name, nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new)


def _kept_dims(table: AxisTable, keeps: Keeps) -> dict[tuple[str, int], Tensor]:
    kept = {}
    for name, keep in keeps.items():
        if not bool(keep.all()):
            index = keep.nonzero().squeeze(1)
            kept.update({(slot.tensor, slot.dim): index for slot in table[name].direct()})
    return kept


def _select(tensor: Tensor, name: str, dims: Mapping[tuple[str, int], Tensor]) -> Tensor:
    for dim in range(tensor.ndim):
        index = dims.get((name, dim))
        if index is not None:
            tensor = tensor.index_select(dim, index.to(tensor.device))
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
        for slot in axis.linked():
            link = str(slot.link)
            new = _select(tensors[link], link, dims)
            keep = keeps.get(axis.name)
            if keep is not None:
                number = (keep.long().cumsum(0) - 1).to(new.device)
                new = number[new]
            links[link] = new.clone()
    return links
