"""What reads the stream last: a normaliser and a map to the outputs.

Activations are feature-major, and shapes are named as in layers.py.
"""

import torch
from torch import Tensor, nn

from gaugelasso import kernels
from gaugelasso.axes import Axis, Cost, Norm, Operation, Size, Slot
from gaugelasso.models.layers import Extractor, Part, normal, size


class Head(Part):
    """Extractor and a linear map to the outputs, which a subclass has; biases with `bias`."""

    def __init__(self, read: Extractor, outputs: int, bias: bool):
        super().__init__()
        self.outputs, self.read = outputs, read
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    @property
    def hidden(self) -> int:
        """Channels of a hidden layer; 0 without one."""
        return 0

    def project(self, normalised: Tensor) -> Tensor:
        """[d, N] -> [outputs, N], perhaps with further rows."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[D, N] -> [N, outputs]."""
        _, normalised = self.read(x)
        rows = self.project(normalised)
        # A slice, even of all rows, costs a copy in the backward pass.
        rows = rows if len(rows) == self.outputs else rows[: self.outputs]
        return (rows if self.bias is None else rows + self.bias.to(rows.dtype)[:, None]).T

    def fixed(self, name: str) -> list[Slot]:
        return [] if self.bias is None else [Slot(f"{name}.bias")]

    def norms(self, name: str) -> list[Norm]:
        return self.read.norms(f"{name}.read")


class Classifier(Head):
    """A head with a map of its own."""

    def __init__(
        self,
        sites: tuple[int, ...],
        outputs: int,
        *,
        tied: bool,
        generator: torch.Generator,
        eps: float = 0.0,
        by_token: bool = False,
        elementwise: bool = False,
        bias: bool = False,
        plain: bool = False,
    ):
        read = Extractor(sites, tied=tied, eps=eps, by_token=by_token, plain=plain)
        super().__init__(read, outputs, bias)
        self.elementwise = elementwise
        self.out = normal((len(sites), outputs), len(sites) ** -0.5, generator)

    def project(self, normalised: Tensor) -> Tensor:
        return kernels.project(normalised, self.read.gain, [self.out])

    def axes(self, name: str) -> list[Axis]:
        silences = self.bias is None
        return [self.read.axis(name, "d_c", (Slot(f"{name}.out"),), silences=silences)]

    def fixed(self, name: str) -> list[Slot]:
        return [Slot(f"{name}.out", 1), *super().fixed(name)]

    def matrices(self, name: str) -> dict[str, int]:
        return {} if self.elementwise else {f"{name}.out": 1}

    def costs(self, name: str) -> list[Cost]:
        axis = (f"{name}.d_c",)
        return [Cost("scale", 1, axis), Cost("matmul", self.outputs, axis)]

    def operations(self, name: str) -> list[Operation]:
        return [Operation("read", (size(f"{name}.d_c"), Size(constant=self.outputs)))]
