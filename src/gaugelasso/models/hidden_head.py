"""A head with a hidden layer, as masked language models have: a map, a GELU and a LayerNorm.

Activations are feature-major, and shapes are named as in layers.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso import kernels
from gaugelasso.axes import Axis, Cost, Norm, Operation, Size, Slot
from gaugelasso.models.centred_norm import CentredNorm
from gaugelasso.models.gelu import Approximation
from gaugelasso.models.heads import Classifier
from gaugelasso.models.layers import normal, size


class HiddenClassifier(Classifier):
    """out(norm(gelu(up(y) + up_bias))); with `bias`, the outputs have biases."""

    def __init__(
        self,
        sites: tuple[int, ...],
        outputs: int,
        *,
        hidden: int,
        approximation: Approximation,
        generator: torch.Generator,
        eps: float,
        by_token: bool,
        **options: Any,
    ):
        norm: dict[str, Any] = {"eps": eps, "by_token": by_token}
        super().__init__(sites, outputs, generator=generator, **norm, **options)
        self.approximation = approximation
        self.up = normal((len(sites), hidden), len(sites) ** -0.5, generator)
        self.up_bias = nn.Parameter(torch.zeros(hidden))
        self.norm = CentredNorm(hidden, **norm)
        self.out = normal((hidden, outputs), hidden**-0.5, generator)

    @property
    def hidden(self) -> int:
        return self.up.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """[D, N] -> [N, outputs]."""
        _, picked = self.read(x)
        rows = kernels.project(picked, self.read.gain, [self.up])
        rows = kernels.add_bias(rows, [self.up_bias])[: self.hidden]
        hidden = self.norm(F.gelu(rows, approximate=self.approximation))
        outputs = hidden.T @ self.out
        return outputs if self.bias is None else outputs + self.bias

    def axes(self, name: str) -> list[Axis]:
        norm = f"{name}.norm"
        hidden = Axis(
            f"{name}.d_h",
            "d_h",
            (Slot(f"{name}.up", 1), Slot(f"{name}.up_bias"), *self.norm.writes(norm)),
            (Slot(f"{name}.out"), *self.norm.reads(norm)),
            self.norm.riders(norm, gauge=False),
            owner=name,
            silences=False,
            gauge=False,
            growth="permutation",
        )
        return [self.read.axis(name, "d_c", (Slot(f"{name}.up"),), silences=False), hidden]

    def norms(self, name: str) -> list[Norm]:
        return [*super().norms(name), self.norm.norm(f"{name}.norm")]

    def matrices(self, name: str) -> dict[str, int]:
        return {**super().matrices(name), f"{name}.up": 1}

    def costs(self, name: str) -> list[Cost]:
        d_c, d_h = f"{name}.d_c", f"{name}.d_h"
        return [
            Cost("scale", 1, (d_c,)),
            Cost("matmul", 1, (d_c, d_h)),
            *CentredNorm.costs(d_h),
            Cost("matmul", self.out.shape[1], (d_h,)),
        ]

    def operations(self, name: str) -> list[Operation]:
        d_c, d_h = size(f"{name}.d_c"), size(f"{name}.d_h")
        return [
            Operation("gelu read", (d_c, d_h)),
            Operation("norm", (d_h,)),
            # The product of a read without its normaliser.
            Operation("read", (d_h, Size(constant=self.out.shape[1]))),
        ]
