"""Retrieval: the token itself says how many places back its label stands.

At position t the offset is token mod `modulus`; the label is the token that many
places back, or the sentinel class `vocabulary` where that is before the start.
Generated on the device; batch k of a stream is a function of (seed, stream, k).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Retrieval:
    vocabulary: int = 4096
    modulus: int = 61
    length: int = 192

    @property
    def outputs(self) -> int:
        return self.vocabulary + 1

    def sample(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(
            self.vocabulary, (size, self.length), generator=generator, device=generator.device
        )
        return tokens, self.labels(tokens)

    def labels(self, tokens: Tensor) -> Tensor:
        source = torch.arange(self.length, device=tokens.device) - tokens % self.modulus
        return torch.where(source < 0, self.vocabulary, tokens.gather(1, source.clamp(min=0)))
