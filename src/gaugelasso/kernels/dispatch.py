"""Which form of a kernel runs: the fused one on a GPU, the plain one elsewhere or on request.

And what both forms go by.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from gaugelasso.errors import UserError

# Fused forms pad the rows of activations and maps with zeros to multiples of this: a
# product with an odd width is several times slower than with the next even eight.
ALIGN = 8
# A target of the cross-entropy that does not count.
NO_TARGET = -100
_plain = False


@cache
def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def fused(tensor: Tensor) -> bool:
    """Whether an operation on this tensor takes its fused form.

    Triton launches on the current device and reckons in float32 at most.
    """
    return (
        tensor.is_cuda
        and not _plain
        and available()
        and tensor.dtype is not torch.float64
        and tensor.device.index == torch.cuda.current_device()
    )


def fused_flat(tensor: Tensor) -> bool:
    """The same of an operation on flat storage, whose fused forms know float32 alone."""
    return tensor.dtype is torch.float32 and fused(tensor)


def check_offsets(rows: int, tokens: int) -> None:
    """Offsets within activations are 32-bit numbers in the fused forms."""
    if rows * tokens >= 2**31:
        raise UserError(
            f"{tokens:,} tokens by {rows:,} channels are too many for one fused pass; take "
            "smaller batches (train.batch, with more train.accumulate) or the plain forms "
            "(train.fused = false)"
        )


@contextmanager
def reference_kernels(on: bool = True) -> Iterator[None]:
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
