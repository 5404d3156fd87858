"""Gains and scales folded into maps, the products, and gradients of the separate factors."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gaugelasso.kernels.dispatch import ALIGN, aligned

# Widths change with the structure, and parameters are views with any alignment.
_COLUMNS = ["c0", "c1", "c2"]
_ROWS = ["rows", "known", "group", "padded"]
_WEIGHTS = ["w0", "w1", "w2", "gain", "scale"]


@triton.jit
def _eights(width, ALIGN: tl.constexpr):
    return (width + ALIGN - 1) // ALIGN * ALIGN


@triton.jit
def _pick(w0, w1, w2, row, c, inside, c0, c1, c2, COUNT: tl.constexpr, ALIGN: tl.constexpr):
    """Elements of up to three concatenated maps, each padded with zeros."""
    v = tl.load(w0 + row * c0 + c, mask=inside & (c < c0), other=0.0)
    if COUNT > 1:
        c -= _eights(c0, ALIGN)
        v += tl.load(w1 + row * c1 + c, mask=inside & (c >= 0) & (c < c1), other=0.0)
    if COUNT > 2:
        c -= _eights(c1, ALIGN)
        v += tl.load(w2 + row * c2 + c, mask=inside & (c >= 0) & (c < c2), other=0.0)
    return v


@triton.jit(do_not_specialize=_ROWS + _COLUMNS, do_not_specialize_on_alignment=_WEIGHTS)
def _fold(w0, w1, w2, gain, scale, out, rows, known, c0, c1, c2, group, padded,
          COUNT: tl.constexpr, GAIN: tl.constexpr, ALIGN: tl.constexpr,
          BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    ld = _eights(c0, ALIGN) + _eights(c1, ALIGN) + _eights(c2, ALIGN)
    row = (r // padded) * group + r % padded
    inside = (row < known) & (r % padded < group)
    v = _pick(w0, w1, w2, row[:, None], c, inside[:, None], c0, c1, c2, COUNT, ALIGN)
    if GAIN:
        v *= tl.load(gain + row, mask=inside, other=0.0)[:, None]
    else:
        v *= tl.load(scale + c, mask=c < c0, other=0.0)
    mask = (r < rows)[:, None] & (c < ld)
    tl.store(out + r[:, None] * ld + c, v.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_COLUMNS, do_not_specialize_on_alignment=_WEIGHTS[:4])
def _unfold_gain(d_out, gain, w0, w1, w2, d0, d1, d2, d_gain, c0, c1, c2,
                 COUNT: tl.constexpr, ALIGN: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    r = tl.program_id(0)
    g = tl.load(gain + r)
    total = tl.zeros((BC,), tl.float32)
    ld = _eights(c0, ALIGN) + _eights(c1, ALIGN) + _eights(c2, ALIGN)
    for start in range(0, ld, BC):
        c = start + tl.arange(0, BC)
        d = tl.load(d_out + r * ld + c, mask=c < ld, other=0.0).to(tl.float32)
        total += d * _pick(w0, w1, w2, r, c, c < ld, c0, c1, c2, COUNT, ALIGN)
        d *= g
        tl.store(d0 + r * c0 + c, d, mask=c < c0)
        if COUNT > 1:
            c -= _eights(c0, ALIGN)
            tl.store(d1 + r * c1 + c, d, mask=(c >= 0) & (c < c1))
        if COUNT > 2:
            c -= _eights(c1, ALIGN)
            tl.store(d2 + r * c2 + c, d, mask=(c >= 0) & (c < c2))
    tl.store(d_gain + r, tl.sum(total))


@triton.jit(
    do_not_specialize=["known", "c0", "group", "padded"],
    do_not_specialize_on_alignment=["w0", "scale"],
)
def _unfold_scale(d_out, scale, w0, d0, d_scale, known, c0, group, padded,
                  ALIGN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    row = (r // padded) * group + r % padded
    inside = ((row < known) & (r % padded < group))[:, None] & (c < c0)[None, :]
    source = d_out + r[:, None] * _eights(c0, ALIGN) + c[None, :]
    d = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    at = row[:, None] * c0 + c[None, :]
    w = tl.load(w0 + at, mask=inside, other=0.0)
    tl.atomic_add(d_scale + c, tl.sum(w * d, axis=0), mask=c < c0)
    s = tl.load(scale + c, mask=c < c0, other=0.0)
    tl.store(d0 + at, d * s[None, :], mask=inside)


def _folded(
    maps: tuple[Tensor, ...], factor: Tensor, inputs: Tensor, group: int, padded: int, gain: bool
) -> Tensor:
    """The concatenated maps times their factor, padded to the rows of the inputs."""
    widths = [m.shape[1] for m in maps] + [0] * (3 - len(maps))
    rows, ld = inputs.shape[0], sum(map(aligned, widths))
    out = torch.empty(rows, ld, device=factor.device, dtype=inputs.dtype)
    grid = (triton.cdiv(rows, 16), triton.cdiv(ld, 128))
    _fold[grid](
        *_three(maps), factor, factor, out, rows, maps[0].shape[0], *widths, group, padded,
        len(maps), gain, ALIGN, 16, 128,
    )  # fmt: skip
    return out


def _three(maps: Sequence[Tensor]) -> list[Tensor]:
    return [*maps, *[maps[0]] * (3 - len(maps))]


class Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, gain, *maps):
        folded = _folded(maps, gain, inputs, 1, 1, True)
        ctx.save_for_backward(inputs, gain, folded, *maps)
        return folded.T @ inputs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        inputs, gain, folded, *maps = ctx.saved_tensors
        d_folded = inputs @ grad.T
        d_gain, d_maps = torch.empty_like(gain), [torch.empty_like(m) for m in maps]
        widths = [m.shape[1] for m in maps] + [0] * (3 - len(maps))
        _unfold_gain[(len(gain),)](
            d_folded, gain, *_three(maps), *_three(d_maps), d_gain, *widths,
            len(maps), ALIGN, 512,
        )  # fmt: skip
        return folded @ grad, d_gain, *d_maps


class Deliver(torch.autograd.Function):
    """`inputs` have groups of `padded` rows, of which the map uses the first `group`."""

    @staticmethod
    def forward(ctx, inputs, matrix, scale, group, padded):
        folded = _folded((matrix,), scale, inputs, group, padded, False)
        ctx.save_for_backward(inputs, matrix, scale, folded)
        ctx.group, ctx.padded = group, padded
        return folded.T @ inputs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        inputs, matrix, scale, folded = ctx.saved_tensors
        d_folded = inputs @ grad.T
        d_matrix, d_scale = torch.empty_like(matrix), torch.zeros_like(scale)
        known, columns = matrix.shape
        grid = (triton.cdiv(len(folded), 64), triton.cdiv(columns, 64))
        _unfold_scale[grid](
            d_folded, scale, matrix, d_matrix, d_scale, known, columns, ctx.group, ctx.padded,
            ALIGN, 64, 64,
        )  # fmt: skip
        # The gradient gets the memory layout of the inputs: row-major or token-major.
        tokens_first = inputs.stride(0) == 1
        d_inputs = (grad.T @ folded.T).T if tokens_first else folded @ grad
        return d_inputs, d_matrix, d_scale, None, None
