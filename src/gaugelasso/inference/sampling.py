"""Draws the next token of every sequence from its logits, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugelasso.models import SpecError


@dataclass(frozen=True)
class Sampling:
    """softmax(logits / temperature), restricted to the likeliest tokens.

    At temperature 0 the likeliest token is taken. `top_k` keeps that many of the likeliest, 0
    keeps all. `top_p` then keeps the fewest of the likeliest whose probabilities sum to at least
    this.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise SpecError(f"temperature = {self.temperature}: must be 0 or more")
        if self.top_k < 0:
            raise SpecError(f"top_k = {self.top_k}: must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise SpecError(f"top_p = {self.top_p}: must be above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """[B, V] -> [B, V]; not for temperature 0."""
        if 0 < self.top_k < logits.shape[1]:
            least = logits.topk(self.top_k, dim=1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        # The largest is subtracted first, so that a temperature close to 0 does not overflow.
        shifted = (logits - logits.amax(1, keepdim=True)) / self.temperature
        probabilities = shifted.softmax(1)
        if self.top_p < 1:
            ordered, order = probabilities.sort(dim=1, descending=True)
            # What likelier tokens sum to; the likeliest always stays.
            before = ordered.cumsum(1) - ordered
            dropped = torch.empty_like(before, dtype=torch.bool)
            dropped.scatter_(1, order, before >= self.top_p)
            probabilities = probabilities.masked_fill(dropped, 0)
        return probabilities

    def draw(self, logits: Tensor, noise: Tensor) -> Tensor:
        """A token [B] for every row of logits [B, V]; `noise` [B, V] is of `refresh_`."""
        if self.greedy:
            return logits.argmax(1)
        # Of independent exponential times at these rates, the first is a draw. So does
        # `torch.multinomial`, whose draws these are, row by row.
        return (self.probabilities(logits) / noise).argmax(1)


def refresh_(noise: Tensor, generators: Sequence[torch.Generator]) -> None:
    """Fill noise [B, V] with exponential draws, every row from its own generator."""
    for row, generator in zip(noise, generators, strict=True):
        row.exponential_(generator=generator)
