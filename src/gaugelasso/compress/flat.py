"""Flat storage: every trainable tensor of a model as a view of one vector.

Matrices come first, then vectors and tables, so an optimizer treats each kind as
one slice. Weights, gradients and optimizer state share the layout, so a cut is one
index vector for all of them. Knows nothing of the meaning of axes, or of losses.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gaugelasso.axes import AxisTable
from gaugelasso.errors import UserError


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
        self.message = self.weight.new_zeros(offset + extra_elements)
        self.grad = self.message[:offset]
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        grads = self.views(self.grad)
        for name, view in self.views(self.weight).items():
            parameter = nn.Parameter(view)
            replace_tensor(model, name, parameter)
            self._gradients.append((parameter, grads[name]))

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
    """flat[index], for a vector of positions. The two forms differ only in speed."""
    return flat[index] if flat.is_cuda else flat.index_select(0, index)


def _check_plain(model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    every = dict(model.named_parameters(remove_duplicate=False))
    for name in every.keys() - parameters.keys():
        raise UserError(
            f"parameter {name!r} is shared between modules; shared weights are not supported"
        )
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            raise UserError(f"parameter {name!r} is frozen; make a constant a buffer")
    first, *others = parameters
    for name in others:
        one, other = parameters[first], parameters[name]
        if (one.dtype, one.device) != (other.dtype, other.device):
            raise UserError(
                f"parameter {first!r} is {one.dtype} on {one.device}, parameter {name!r} is "
                f"{other.dtype} on {other.device}; all parameters must have one dtype and one "
                "device, so call model.to(device, dtype) first"
            )


def replace_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer `name` of the model.

    By a new Parameter object, not by new data in the old one: autograd nodes of a loss that is
    still in use refer to the old shape.
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(tensor, nn.Parameter):
        module._parameters[leaf] = tensor
    else:
        module._buffers[leaf] = tensor
