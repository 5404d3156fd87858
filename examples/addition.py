"""A task of your own over finite data: a + b modulo a prime.

The tokens are a, b and "="; the answer is predicted at "=". There are only `modulus`² problems.
Each belongs to one stream for good: a share `held_out` is divided between selection and test data,
and training draws from the others.

    gaugelasso train configs/addition/small.toml --out runs/addition
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso import UserError
from gaugelasso.models import InputKind
from gaugelasso.tasks import Draw


@dataclass(frozen=True)
class Addition:
    modulus: int = 97
    held_out: float = 0.3

    metric_name: ClassVar[str] = "accuracy"
    metric_lower_is_better: ClassVar[bool] = False
    input_kind: ClassVar[InputKind] = "tokens"
    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.modulus < 2:
            raise UserError(f"task.modulus = {self.modulus}: must be at least 2")
        if not 0 < self.held_out < 1 or not all(map(len, self.parts())):
            raise UserError(
                f"task.held_out = {self.held_out}: must be between 0 and 1 and leave problems for "
                "training, selection and test"
            )

    @property
    def inputs(self) -> int:
        return self.modulus + 1  # the last one is "="

    @property
    def outputs(self) -> int:
        return self.modulus

    @property
    def length(self) -> int:
        return 3

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The problems of training, selection and test data, each as a * modulus + b."""
        return _parts(self.modulus, self.held_out)

    def batch(self, size: int, draw: Draw, device: str) -> tuple[Tensor, Tensor]:
        problems = self.parts()[draw.stream].to(device)
        if draw.held_out:  # in order, so that enough batches have each problem
            chosen = torch.arange(draw.index * size, (draw.index + 1) * size) % len(problems)
        else:
            generator = torch.Generator(device).manual_seed(draw.seed)
            chosen = torch.randint(len(problems), (size,), generator=generator, device=device)
        a, b = problems[chosen] // self.modulus, problems[chosen] % self.modulus
        tokens = torch.stack([a, b, torch.full_like(a, self.modulus)], dim=1)
        return tokens, (a + b) % self.modulus

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[:, -1].float(), targets)

    def metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, -1].argmax(dim=-1) == targets).float().mean()


@lru_cache(maxsize=8)
def _parts(modulus: int, held_out: float) -> tuple[Tensor, Tensor, Tensor]:
    # Not by the run's seed: all runs are tested on the same problems.
    order = torch.randperm(modulus**2, generator=torch.Generator().manual_seed(0))
    each = round(held_out * len(order) / 2)
    return order[2 * each :], order[:each], order[each : 2 * each]
