"""A task of your own: sort symbols.

A sequence is `count` symbols, a separator, and the same symbols sorted. At the separator and at
each sorted symbol the model predicts the next sorted one; the positions before have no target.

    gaugelasso train configs/sorting/small.toml --out runs/sorting
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso import UserError
from gaugelasso.models import InputKind
from gaugelasso.tasks import Draw


@dataclass(frozen=True)
class Sorting:
    count: int = 8
    symbols: int = 16

    metric_name: ClassVar[str] = "exact match"
    metric_lower_is_better: ClassVar[bool] = False
    input_kind: ClassVar[InputKind] = "tokens"
    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for key in ("count", "symbols"):
            if getattr(self, key) < 1:
                raise UserError(f"task.{key} = {getattr(self, key)}: must be at least 1")

    @property
    def inputs(self) -> int:
        return self.symbols + 1  # the last one is the separator

    @property
    def outputs(self) -> int:
        return self.symbols

    @property
    def length(self) -> int:
        return 2 * self.count

    def batch(self, size: int, draw: Draw, device: str) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(draw.seed)
        symbols = torch.randint(
            self.symbols, (size, self.count), generator=generator, device=device
        )
        targets = symbols.sort(dim=1).values
        separator = torch.full((size, 1), self.symbols, device=device)
        return torch.cat([symbols, separator, targets[:, :-1]], dim=1), targets

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        answers = outputs[:, -self.count :].float()
        return F.cross_entropy(answers.flatten(0, 1), targets.flatten())

    def metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The share of sequences without an error."""
        right = outputs[:, -self.count :].argmax(dim=-1) == targets
        return right.all(dim=1).float().mean()
