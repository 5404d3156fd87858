"""Chooses the form of a kernel: fused on a GPU, the reference elsewhere or on request.

Also holds the conventions that both forms share: alignment, ignored targets, precision.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from gaugelasso.errors import UserError

# Fused forms pad the rows of activations and maps with zeros to multiples of this: a matrix
# product of an odd width is several times slower than one of the next multiple of eight.
ALIGN = 8
# A target that the cross-entropy ignores.
NO_TARGET = -100
_plain = False


@cache
def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def fused(tensor: Tensor) -> bool:
    """Whether an operation on this tensor takes its fused form.

    Triton launches on the current device and computes in float32 at most.
    """
    return (
        tensor.is_cuda
        and not _plain
        and available()
        and tensor.dtype is not torch.float64
        and tensor.device.index == torch.cuda.current_device()
    )


def fused_flat(tensor: Tensor) -> bool:
    """As `fused`, for an operation on flat storage, whose fused forms support float32 alone."""
    return tensor.dtype is torch.float32 and fused(tensor)


def check_offsets(rows: int, tokens: int) -> None:
    """UserError if an offset within activations exceeds 32 bits, which fused forms use."""
    if rows * tokens >= 2**31:
        raise UserError(
            f"{tokens:,} tokens by {rows:,} channels are too many for one fused pass; use "
            "smaller batches (train.batch, with more train.accumulate) or the reference kernels "
            "(train.fused = false)"
        )


@contextmanager
def reference_kernels(on: bool = True) -> Iterator[None]:
    """Within this context every kernel takes its reference form (with False: its usual form)."""
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
