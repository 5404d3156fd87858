"""An MLP with one GELU between its two maps, and with biases.

Activations are feature-major, and shapes are named as in layers.py.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso import kernels
from gaugelasso.axes import Axis, Slot
from gaugelasso.models.layers import Extractor, Injector, normal
from gaugelasso.models.operators import Mlp
from gaugelasso.models.spec import MlpSpec

# GELU(z) = z Phi(z), with the normal distribution Phi itself, or with its approximation by tanh.
Approximation = Literal["none", "tanh"]


class GeluMlp(Mlp):
    """down(gelu(up(y) + up_bias)); with `write_bias`, what is written has biases."""

    reading = "gelu read", 1

    def __init__(
        self,
        spec: MlpSpec,
        *,
        approximation: Approximation,
        tied: bool,
        shrink: float,
        generator: torch.Generator,
        eps: float = 0.0,
        by_token: bool = False,
        plain: bool = False,
        write_bias: bool = False,
    ):
        super().__init__()
        d_in, d_out = len(spec.reads), len(spec.writes)
        self.depth, self.approximation = spec.depth, approximation
        self.read = Extractor(spec.reads, tied=tied, eps=eps, by_token=by_token, plain=plain)
        self.up = normal((d_in, spec.filters), d_in**-0.5, generator)
        self.up_bias = nn.Parameter(torch.zeros(spec.filters))
        self.down = normal((spec.filters, d_out), shrink * spec.filters**-0.5, generator)
        self.write = Injector(spec.writes, write_bias)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        x, normalised = self.read(x)
        rows = kernels.project(normalised, self.read.gain, [self.up])
        hidden = F.gelu(kernels.add_bias(rows, [self.up_bias]), approximate=self.approximation)
        return self.write(x, kernels.deliver(hidden, self.down, self.write.scale))

    def axes(self, name: str) -> list[Axis]:
        return [
            # Without inputs, the GELU of the biases is still written.
            self.read.axis(name, "d_mi", (Slot(f"{name}.up"),), silences=False),
            # gelu(c z) is not c gelu(z): no gauge. gelu(0) = 0, so a filter whose weights and bias
            # are zero writes nothing.
            Axis(
                f"{name}.d_f",
                "d_f",
                (Slot(f"{name}.up", 1), Slot(f"{name}.up_bias")),
                (Slot(f"{name}.down"),),
                owner=name,
                silences=self.write.bias is None,
                gauge=False,
                growth="permutation",
            ),
            self.write.axis(name, "d_mo", (Slot(f"{name}.down", 1),)),
        ]

    def matrices(self, name: str) -> dict[str, int]:
        return {f"{name}.up": 1, f"{name}.down": 1}
