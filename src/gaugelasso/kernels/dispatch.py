"""Which form of a kernel runs: the fused one on a GPU, the plain one elsewhere or on request."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

# Fused forms pad the rows of activations and maps with zeros to multiples of this: a
# product with an odd width is several times slower than with the next even eight.
ALIGN = 8
_plain = False


@cache
def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def fused(tensor: Tensor) -> bool:
    return tensor.is_cuda and not _plain and available()


@contextmanager
def plainly(on: bool = True) -> Iterator[None]:
    """Within it every kernel takes its plain form (or, with False, its usual one)."""
    global _plain
    before, _plain = _plain, on
    try:
        yield
    finally:
        _plain = before


def aligned(width: int) -> int:
    return -(-width // ALIGN) * ALIGN


def work_dtype(tensor: Tensor) -> torch.dtype:
    """The precision of matrix products on this tensor's device."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
