"""Noise: random tokens and random labels, for benchmarks of any shape. Nothing can be learned."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.errors import UserError
from gaugelasso.models import InputKind
from gaugelasso.tasks.protocol import Draw


@dataclass(frozen=True)
class Noise:
    vocabulary: int = 256
    classes: int = 256
    length: int = 512
    causal: bool = True

    metric_name: ClassVar[str] = "accuracy"
    metric_lower_is_better: ClassVar[bool] = False
    metric_best: ClassVar[float] = 1.0
    input_kind: ClassVar[InputKind] = "tokens"

    def __post_init__(self) -> None:
        for key in ("vocabulary", "classes", "length"):
            if not 1 <= getattr(self, key) <= 2**20:
                raise UserError(f"task.{key} = {getattr(self, key)}: must be 1 to {2**20}")

    @property
    def inputs(self) -> int:
        return self.vocabulary

    @property
    def outputs(self) -> int:
        return self.classes

    def batch(self, size: int, draw: Draw, device: str) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(draw.seed)
        shape = (size, self.length)
        tokens = torch.randint(self.vocabulary, shape, generator=generator, device=device)
        labels = torch.randint(self.classes, shape, generator=generator, device=device)
        return tokens, labels

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return kernels.cross_entropy(outputs, targets)

    def metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(-1) == targets).float().mean()
