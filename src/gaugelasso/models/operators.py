"""The operators between embedding and classifier: attention, from its own file, and SwiGLU.

Activations are feature-major, and shapes are named as in layers.py.
"""

from typing import ClassVar

from torch import Tensor, nn

from gaugelasso import kernels
from gaugelasso.axes import Axis, Cost, Operation, Slot
from gaugelasso.models.attention import Attention
from gaugelasso.models.layers import Operator, OperatorOptions, normal, size
from gaugelasso.models.operator_spec import MlpSpec

__all__ = ["Attention", "Mlp", "Operator", "SwiGLU"]


class Mlp(Operator):
    """Maps that read, a nonlinearity for each filter, and a map that writes."""

    reading: ClassVar[tuple[str, int]]  # the name of its first operation, and the number of maps
    up: nn.Parameter

    def costs(self, name: str) -> list[Cost]:
        d_mi, d_f, d_mo = self._widths(name)
        return [
            Cost("scale", 1, (d_mi,)),
            Cost("matmul", self.reading[1], (d_mi, d_f)),
            Cost("matmul", 1, (d_f, d_mo)),
            Cost("scale", 1, (d_mo,)),
        ]

    def operations(self, name: str) -> list[Operation]:
        d_mi, d_f, d_mo = self._widths(name)
        return [
            Operation(self.reading[0], (size(d_mi), size(d_f))),
            Operation("write", (size(d_f), size(d_mo))),
        ]

    def spec(self) -> MlpSpec:
        reads, writes = (tuple(t.sites.tolist()) for t in (self.read, self.write))
        return MlpSpec(self.depth, reads, writes, self.up.shape[1])

    @staticmethod
    def _widths(name: str) -> tuple[str, str, str]:
        return f"{name}.d_mi", f"{name}.d_f", f"{name}.d_mo"


class SwiGLU(Mlp):
    """down(up(y) * silu(gate(y))); what is written may have biases."""

    reading = "gated read", 2

    def __init__(self, spec: MlpSpec, options: OperatorOptions):
        super().__init__()
        generator = options.generator
        d_in, d_out = len(spec.reads), len(spec.writes)
        self.depth = spec.depth
        self.read = options.read(spec.reads)
        self.up = normal((d_in, spec.filters), d_in**-0.5, generator)
        self.gate = normal((d_in, spec.filters), d_in**-0.5, generator)
        self.down = normal((spec.filters, d_out), options.shrink * spec.filters**-0.5, generator)
        self.write = options.write(spec.writes)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        x, normalised = self.read(x)
        both = kernels.project(normalised, self.read.gain, [self.up, self.gate])
        return self.write(x, kernels.deliver(kernels.swiglu(both), self.down, self.write.scale))

    def axes(self, name: str) -> list[Axis]:
        silences = self.write.bias is None
        maps = Slot(f"{name}.up"), Slot(f"{name}.gate")
        return [
            self.read.axis(name, "d_mi", maps, silences=silences),
            Axis(
                f"{name}.d_f",
                "d_f",
                (Slot(f"{name}.up", 1),),
                (Slot(f"{name}.down"),),
                (Slot(f"{name}.gate", 1),),
                owner=name,
                silences=silences,
                growth="permutation",
            ),
            self.write.axis(name, "d_mo", (Slot(f"{name}.down", 1),)),
        ]

    def matrices(self, name: str) -> dict[str, int]:
        return {f"{name}.up": 1, f"{name}.gate": 1, f"{name}.down": 1}
