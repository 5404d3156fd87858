"""Flat storage: every trainable tensor of a model as a view of one vector.

Matrices come first, then vectors and tables, so an optimizer treats each kind as
one slice. Weights, gradients and optimizer state share the layout; a cut is one
index vector applied to all of them. Knows nothing of axes' meaning or of losses.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gaugelasso.axes import AxisTable
from gaugelasso.errors import UserError


@dataclass(frozen=True)
class Segment:
    """Where one tensor lies in the flat vector."""

    start: int
    shape: torch.Size

    @property
    def end(self) -> int:
        return self.start + self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.end].view(self.shape)


class FlatStore:
    """The parameters of a model, re-pointed at one weight vector and one gradient vector.

    The model's own parameters become views: an update of `weight` is an update of
    the model. Gradients are autograd's until `collect_grads_` takes them in. `message` is the
    gradient followed by `extra_elements` that ranks exchange along with it.
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
        self._homes: list[tuple[nn.Parameter, Tensor]] = []
        grads = self.views(self.grad)
        for name, view in self.views(self.weight).items():
            parameter = nn.Parameter(view)
            replace_tensor(model, name, parameter)
            self._homes.append((parameter, grads[name]))

    def collect_grads_(self) -> None:
        """Move the parameters' gradients into `grad`, zero where there is none."""
        homes, found = [], []
        for parameter, home in self._homes:
            if parameter.grad is None:
                home.zero_()
            else:
                homes.append(home)
                found.append(parameter.grad)
                parameter.grad = None
        if found:
            torch._foreach_copy_(homes, found)

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
    """flat[index], for a vector of positions. The two forms differ in speed alone."""
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
    """Put a new parameter or buffer where `name` stands in the model.

    A new Parameter object, not new data in the old one: autograd nodes of a loss
    that is still alive remember the old shape.
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(tensor, nn.Parameter):
        module._parameters[leaf] = tensor
    else:
        module._buffers[leaf] = tensor
