"""Retrieval: each token encodes how many positions back its label is.

At position t the offset is token mod `modulus`. The label is the token that many positions
back, or the sentinel class `vocabulary` if that is before the start.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.errors import UserError
from gaugelasso.models import InputKind
from gaugelasso.tasks.protocol import Draw


@dataclass(frozen=True)
class Retrieval:
    vocabulary: int = 4096
    modulus: int = 61
    length: int = 192

    metric_name: ClassVar[str] = "accuracy"
    metric_lower_is_better: ClassVar[bool] = False
    metric_best: ClassVar[float] = 1.0
    input_kind: ClassVar[InputKind] = "tokens"
    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for key in ("vocabulary", "modulus", "length"):
            if getattr(self, key) < 1:
                raise UserError(f"task.{key} = {getattr(self, key)}: must be at least 1")
        if self.modulus > self.vocabulary:
            raise UserError(
                f"task.modulus = {self.modulus} is larger than task.vocabulary = "
                f"{self.vocabulary}; it must be at most that"
            )

    @property
    def inputs(self) -> int:
        return self.vocabulary

    @property
    def outputs(self) -> int:
        return self.vocabulary + 1

    def batch(self, size: int, draw: Draw, device: str) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(draw.seed)
        tokens = torch.randint(
            self.vocabulary, (size, self.length), generator=generator, device=device
        )
        return tokens, self.labels(tokens)

    def labels(self, tokens: Tensor) -> Tensor:
        source = torch.arange(tokens.shape[1], device=tokens.device) - tokens % self.modulus
        return torch.where(source < 0, self.vocabulary, tokens.gather(1, source.clamp(min=0)))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return kernels.cross_entropy(outputs, targets)

    def metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(dim=-1) == targets).float().mean()
