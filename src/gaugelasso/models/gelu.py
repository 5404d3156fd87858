"""An MLP with one GELU between its two maps, and with biases.

Activations are feature-major, and shapes are named as in layers.py.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso import kernels
from gaugelasso.axes import Axis, Slot
from gaugelasso.models.layers import OperatorOptions, normal
from gaugelasso.models.operator_spec import MlpSpec
from gaugelasso.models.operators import Mlp

# GELU(z) = z Phi(z), with the normal distribution Phi itself, or with its approximation by tanh.
Approximation = Literal["none", "tanh"]


class GeluMlp(Mlp):
    """down(gelu(up(y) + up_bias)); what is written may have biases."""

    reading = "gelu read", 1

    def __init__(self, spec: MlpSpec, options: OperatorOptions, approximation: Approximation):
        super().__init__()
        generator = options.generator
        d_in, d_out = len(spec.reads), len(spec.writes)
        self.depth, self.approximation = spec.depth, approximation
        self.read = options.read(spec.reads)
        self.up = normal((d_in, spec.filters), d_in**-0.5, generator)
        self.up_bias = nn.Parameter(torch.zeros(spec.filters))
        self.down = normal((spec.filters, d_out), options.shrink * spec.filters**-0.5, generator)
        self.write = options.write(spec.writes)

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
