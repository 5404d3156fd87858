"""Compares an exported model, read back from its files, with the float32 inference form.

Random inputs of several batch sizes and lengths, whole and, for a model that generates, in
pieces with a cache and padded on the left.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.export.source import Source
from gaugelasso.inference import InferenceModel

# Of the spread of the outputs, for float32.
LARGEST = 1e-4
# Outputs may be this many times as far off as the inference form is by its own rounding: the order
# of sums differs, and with it the rounding. Pretrained models have tokens that amplify it.
ROUNDING = 8.0

# Outputs of one sequence: those of a long context and a large vocabulary would fill the memory.
_MOST_LOGITS, _LEAST_LENGTH = 2**23, 16

# Gets a line for each stage of an export.
Say = Callable[[str], None]
Whole = Callable[[Tensor], Tensor]
# Tokens [B, S], mask [B, T + S], positions [B, S] and what the last call returned (None at first)
# -> logits [B, S, outputs] and what the next call gets.
Step = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Any]]


class Comparison:
    """The inputs, and what the float32 inference form makes of them.

    `dtype` is the precision of the weights, and of the products unless `in_float32`.
    """

    def __init__(
        self,
        source: Source,
        dtype: torch.dtype,
        say: Say | None = None,
        *,
        in_float32: bool = False,
    ):
        self.dtype, self._source, self._say = dtype, source, say
        self.exact = source.served()
        self.spec = self.exact.spec
        self.length = min(self.spec.length, max(_LEAST_LENGTH, _MOST_LOGITS // self.spec.outputs))
        # One input for the spread: a single position may have outputs that are nearly equal.
        with torch.inference_mode():
            self.spread = float(self.exact(self._inputs(4, self.length, 0)).std())
        if not math.isfinite(self.spread):
            raise UserError(f"{str(source.run)!r}: its outputs are not finite numbers")
        self.limit = LARGEST
        if dtype != torch.float32:
            rounded = source.served(dtype)
            rounded = rounded.float() if in_float32 else rounded
            own = _worst(self._whole_deviations(rounded))
            if not math.isfinite(own):
                name = str(dtype).removeprefix("torch.")
                raise UserError(
                    f"{str(source.run)!r}: in {name} its outputs are not finite numbers; choose "
                    "another --dtype"
                )
            self.limit = max(LARGEST, ROUNDING * own)

    def check(self, what: str, whole: Whole | None = None, step: Step | None = None) -> float:
        """The largest deviation, relative to the spread; UserError if it is above the limit."""
        if self._say:
            self._say(f"comparing {what}")
        with torch.inference_mode():
            found = [0.0]
            if whole:
                found += self._whole_deviations(whole)
            if step:
                found += self._step_deviations(step)
        worst = _worst(found)
        if not worst <= self.limit and self.dtype == torch.float32:
            self.limit = max(LARGEST, ROUNDING * self._rounding_of_float32())
        if not worst <= self.limit:
            raise UserError(
                f"{what}: its outputs are off by {worst:.2g} of their spread, more than "
                f"{self.limit:.2g}, so nothing was written; another version of the library that "
                "wrote it may be right"
            )
        return worst

    def _rounding_of_float32(self) -> float:
        """How far the float32 inference form is off the same in float64."""
        precise = self._source.served().double()
        return _worst(self._whole_deviations(lambda inputs: precise(_in_float64(inputs))))

    def _whole_deviations(self, whole: Whole) -> Iterator[float]:
        length = self.length
        sizes = [(1, 1), (1, length), (2, max(1, length // 2)), (3, min(length, 7))]
        for seed, (batch, size) in enumerate(sizes):
            inputs = self._inputs(batch, size, seed)
            with torch.inference_mode():
                yield self._deviation(whole(inputs), self.exact(inputs))

    def _step_deviations(self, step: Step) -> Iterator[float]:
        length = self.length
        for seed, (batch, size) in enumerate([(1, length), (3, min(length, 9))]):
            tokens = self._inputs(batch, size, seed)
            lengths = torch.tensor([max(1, size - 2 * row) for row in range(batch)])
            mask = torch.arange(size) >= size - lengths[:, None]
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            expected = self.exact(tokens, lengths, padding="left")
            past = None
            cuts = sorted({0, size // 2, size // 2 + 1, size})
            for start, stop in pairwise(cuts):
                part = slice(start, stop)
                logits, past = step(
                    tokens[:, part].contiguous(),
                    mask[:, :stop].long().contiguous(),
                    positions[:, part].contiguous(),
                    past,
                )
                here = mask[:, part]
                yield self._deviation(logits[here], expected[:, part][here])

    def _deviation(self, new: Tensor, expected: Tensor) -> float:
        if new.shape != expected.shape:
            raise UserError(
                f"an exported model returned outputs of shape {tuple(new.shape)}, not "
                f"{tuple(expected.shape)}"
            )
        off = (
            (new.detach().cpu().float() - expected).abs().max() if new.numel() else torch.zeros(())
        )
        return float(off) / max(self.spread, 1e-9)

    def _inputs(self, batch: int, size: int, seed: int) -> Tensor:
        return random_inputs(self.exact, batch, size, seed)


def _worst(deviations: Iterable[float]) -> float:
    """The largest; NaN counts as infinite."""
    return max(deviations, key=lambda each: each if each == each else math.inf, default=0.0)


def _in_float64(inputs: Tensor) -> Tensor:
    return inputs.double() if inputs.is_floating_point() else inputs


def random_inputs(served: InferenceModel, batch: int, size: int, seed: int = 0) -> Tensor:
    """Inputs of the kind that the model reads, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    spec = served.spec
    if spec.input_kind == "tokens":
        return torch.randint(spec.inputs, (batch, size), generator=generator)
    patches = torch.randn(batch, size, spec.inputs, generator=generator)
    if spec.input_kind == "patches":
        return patches
    hidden = torch.rand(batch, size, 1, generator=generator) < 0.5
    return torch.cat([patches.masked_fill(hidden, 0), hidden.float()], dim=-1)
