"""Flat storage: every trainable tensor of a model as a view of one vector.

Matrices come first, then vectors and tables, so an optimizer treats each kind as
one slice. Weights, gradients and optimizer state share the layout, so a cut is one
index vector for all of them. Knows nothing of the meaning of axes, or of losses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gaugelasso.axes import AxisTable
from gaugelasso.errors import UserError

Places = Mapping[str, Mapping[str, dict[str, Any]]]


@dataclass(frozen=True)
class Segment:
    """The position of one tensor in the flat vector."""

    start: int
    shape: torch.Size

    @property
    def end(self) -> int:
        return self.start + self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.end].view(self.shape)


class FlatStore:
    """The parameters of a model in one weight vector, and their gradients in another.

    The model's parameters become views of `weight`: an update of `weight` updates the model.
    Autograd owns the gradients until `collect_grads_` copies them. `message` is the gradient
    followed by `extra_elements`, which ranks exchange together.
    """

    def __init__(self, model: nn.Module, table: AxisTable, extra_elements: int = 0):
        parameters = dict(model.named_parameters())
        _check_plain(model, parameters)
        order = [name for name in parameters if name in table.matrices]
        order += [name for name in parameters if name not in table.matrices]
        self.segments: dict[str, Segment] = {}
        offset = 0
        for name in order:
            self.segments[name] = Segment(offset, parameters[name].shape)
            offset = self.segments[name].end
        self.matrix_end = max(
            (s.end for name, s in self.segments.items() if name in table.matrices), default=0
        )
        self.weight = torch.cat([parameters[name].detach().reshape(-1) for name in order])
        del parameters
        places = tensor_places(model)
        views = {name: nn.Parameter(view) for name, view in self.views(self.weight).items()}
        for name, parameter in views.items():
            replace_tensor(places, name, parameter)
        # Last, so that the memory of the tensors that were replaced can serve it.
        self.message = self.weight.new_zeros(offset + extra_elements)
        self.grad = self.message[:offset]
        grads = self.views(self.grad)
        self._gradients = [(parameter, grads[name]) for name, parameter in views.items()]

    def release_grads_(self) -> None:
        """Release the memory of the gradients; the store takes in no others afterwards."""
        self._gradients.clear()
        self.message = self.grad = self.weight[:0]

    def collect_grads_(self) -> None:
        """Move the parameters' gradients into `grad`; zero for a parameter without one."""
        targets, sources = [], []
        for parameter, target in self._gradients:
            if parameter.grad is None:
                target.zero_()
            else:
                targets.append(target)
                sources.append(parameter.grad)
                parameter.grad = None
        if sources:
            torch._foreach_copy_(targets, sources)

    def has_grads(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(parameter.grad is not None for parameter, _ in self._gradients)

    def separated(self, model: nn.Module) -> str | None:
        """The name of a parameter of the model that is not a view of `weight` any more, or None.

        Compares objects and addresses, so it does not wait for the device.
        """
        own = dict(model.named_parameters())
        for (name, segment), (parameter, _) in zip(
            self.segments.items(), self._gradients, strict=True
        ):
            if own.get(name) is not parameter or not self._holds(parameter, segment):
                return name
        return None

    def converted(self) -> bool:
        """As `separated`, by one parameter: a conversion of the model changes them all."""
        segment, (parameter, _) = next(iter(self.segments.values())), self._gradients[0]
        return not self._holds(parameter, segment)

    def _holds(self, parameter: nn.Parameter, segment: Segment) -> bool:
        start = self.weight.data_ptr() + segment.start * self.weight.element_size()
        same = parameter.dtype is self.weight.dtype and parameter.device == self.weight.device
        return same and (not parameter.numel() or parameter.data_ptr() == start)

    def __len__(self) -> int:
        return self.weight.numel()

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """A state vector as named tensors of the parameters' shapes."""
        parts = flat.split([segment.shape.numel() for segment in self.segments.values()])
        return {
            name: part.view(segment.shape)
            for (name, segment), part in zip(self.segments.items(), parts, strict=True)
        }


def pick(flat: Tensor, index: Tensor) -> Tensor:
    """flat[index], for a vector of positions. The two forms differ only in speed and memory.

    On a GPU the first one is faster, but makes 64-bit positions of shorter ones.
    """
    wide = index.dtype is torch.long
    return flat[index] if flat.is_cuda and wide else flat.index_select(0, index)


def _check_plain(model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            raise UserError(f"parameter {name!r} is frozen; make a constant a buffer")
    if not parameters:
        raise UserError(f"{type(model).__name__} has no parameters to train")
    first, *others = parameters
    one = parameters[first]
    for name in others:
        other = parameters[name]
        if (one.dtype, one.device) != (other.dtype, other.device):
            raise UserError(
                f"parameter {first!r} is {one.dtype} on {one.device}, parameter {name!r} is "
                f"{other.dtype} on {other.device}; all parameters must have one dtype and one "
                "device, so call model.to(device, dtype) first"
            )
    if one.dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"the parameters are {one.dtype}, in which small steps are rounded away; keep the "
            "weights in torch.float32 and run the forward pass in torch.autocast"
        )


def tensor_places(model: nn.Module) -> Places:
    """The first name of each parameter and buffer -> all its names, and what it is registered in.

    A tied tensor has several names.
    """
    places: dict[int, dict[str, dict[str, Any]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for register in (module._parameters, module._buffers):
            for leaf, tensor in register.items():
                if tensor is not None:
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    places.setdefault(id(tensor), {})[name] = register
    return {next(iter(names)): names for names in places.values()}


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Name -> the further names of the same parameter or buffer, where a tensor has several."""
    places = tensor_places(model).items()
    return {first: list(names)[1:] for first, names in places if len(names) > 1}


def replace_tensor(places: Places, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer `name` of a model by a new one, under all its names.

    By a new Parameter object, not by new data in the old one: autograd nodes of a loss that is
    still in use refer to the old shape.
    """
    for each, register in places[name].items():
        register[each.rpartition(".")[2]] = tensor
