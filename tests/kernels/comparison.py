"""Seeded tensors, zero padding, and the comparison of a fused kernel with its reference."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso import kernels
from tests.kernels import CUDA, DEVICE

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]


def draw(*shape: int, seed: int = 0, positive: bool = False) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return (values.abs() + 0.1 if positive else values).to(DEVICE)


def draw_indices(below: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def draw_sites(size: int, count: int, seed: int = 0) -> Tensor:
    """`count` different sites of a stream of `size`, in random order."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count].to(DEVICE)


def trim(rows: Tensor, *widths: int) -> Tensor:
    """Rows of several padded blocks without their padding, which must be zero."""
    kept, start = [], 0
    for width in widths:
        end = start + -(-width // 8) * 8
        assert (rows[start + width : end] == 0).all()
        kept.append(rows[start : start + width])
        start = end
    assert start == len(rows)
    return torch.cat(kept)


def pad(rows: Tensor, *widths: int) -> Tensor:
    """The inverse of `trim`."""
    blocks = [F.pad(b, (0, 0, 0, -len(b) % 8)) for b in rows.split(widths)]
    return torch.cat(blocks)


def outputs_and_gradients(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of a random functional of them for every input."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    total = sum((draw(*out.shape, seed=7 + i) * out.float()).sum() for i, out in enumerate(outputs))
    gradients = torch.autograd.grad(total, leaves)
    return [*(out.detach() for out in outputs), *gradients]


def compare(plain: Any, fused: Any, inputs: list[Tensor], tolerance: float) -> None:
    """Errors of outputs and gradients, relative to the largest element of each."""
    with kernels.reference_kernels():
        expected = outputs_and_gradients(plain, inputs)
    got = outputs_and_gradients(fused, inputs)
    assert_close(expected, got, expected, tolerance)


def assert_close(
    expected: list[Tensor], got: list[Tensor], terms: list[Tensor], tolerance: float
) -> None:
    """Errors relative to the largest element of the result or of its terms."""
    for number, (right, ours, term) in enumerate(zip(expected, got, terms, strict=True)):
        assert ours.shape == right.shape, number
        error = float((ours.float() - right.float()).abs().max())
        size = max(float(right.float().abs().max()), float(term.float().abs().max()))
        assert error <= tolerance * size + 1e-12, (number, error, size)
