"""A case of `serving.py`: what is asked of each engine, and what is impossible from the start."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from gaugelasso.models import TransformerSpec

Action = Callable[[], Any]
# Tokens of one timed decoding: the host waits once for all of them.
BLOCK = 16
# From so many outputs on, prefill gives the logits of the last position alone, as engines do when
# they serve: those of all positions would take most of the time and of the memory.
LARGE_VOCABULARY = 2**14
# Bytes of a model that is prepared and measured, in those of its weights (the model itself, the
# form of an engine, a file of it) and of its logits (those of two engines, and their difference).
COPIES = 3


class Impossible(Exception):
    """This engine cannot do this case."""


@dataclass(frozen=True)
class Case:
    """Prefill: logits of `batch` sequences. Decode: one more token of each.

    Of all positions, or with `last` of the last one of each sequence.
    """

    phase: Literal["prefill", "decode"]
    batch: int
    length: int
    device: str
    threads: int | None = None
    last: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.startswith("cuda") else torch.float32

    @property
    def calls(self) -> int:
        """Passes of the model in one action."""
        return 1 if self.phase == "prefill" else min(BLOCK, self.length)

    @property
    def tokens(self) -> int:
        """Tokens of one action."""
        return self.batch * (self.length if self.phase == "prefill" else self.calls)

    def inputs(self, vocabulary: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        size = (self.batch, self.length)
        return torch.randint(vocabulary, size, generator=generator).to(self.device)


def at_most(case: Case, length: int) -> Case:
    """The case for a model of this length."""
    return replace(case, length=min(case.length, length))


def fitted(case: Case, spec: TransformerSpec) -> Case:
    """The case for a model: at most of its length, and the logits that its vocabulary allows."""
    last = case.phase == "prefill" and spec.causal and spec.outputs >= LARGE_VOCABULARY
    return replace(at_most(case, spec.length), last=last)


def check_memory(spec: TransformerSpec, case: Case, free: int) -> None:
    """Impossible, with the sizes, if the case needs more than the bytes that are free."""
    positions = case.batch * (1 if case.last or case.phase == "decode" else case.length)
    parts = {
        "weights": case.dtype.itemsize * spec.weights,
        "logits": case.dtype.itemsize * positions * spec.outputs,
    }
    if COPIES * sum(parts.values()) > free:
        sizes = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in parts.items())
        raise Impossible(
            f"{COPIES} copies of {sizes} do not fit into {free / 1e9:.3g} GB of free memory"
        )
