"""Cross-entropies: partial sums over slices of the classes, their combination, the gradient.

Softmax, logarithm and product of a vocabulary are never written: each pass reads the logits alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gaugelasso.kernels.dispatch import NO_TARGET

BN, BC = 32, 128
# A kernel can read only globals of this type.
_NO_TARGET = tl.constexpr(NO_TARGET)


@triton.jit
def _partial(logits, tops, totals, N, classes, slice, to_token, to_class,
             BN: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Largest logit and sum of exp(logit - largest) over one slice of the classes."""
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    live = n < N
    top = tl.full((BN,), float("-inf"), tl.float32)
    total = tl.zeros((BN,), tl.float32)
    end = tl.minimum((part + 1) * slice, classes)
    for start in range(part * slice, end, BC):
        c = start + tl.arange(0, BC).to(tl.int64)
        at = logits + c[:, None] * to_class + n[None, :] * to_token
        mask = (c < end)[:, None] & live[None, :]
        v = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(v, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(v - base[None, :]), axis=0)
        top = higher
    tl.store(tops + part * N + n, top, mask=live)
    tl.store(totals + part * N + n, total, mask=live)


@triton.jit
def _join(logits, targets, tops, totals, losses, lse, N, classes, parts, to_token, to_class,
          BN: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    part = tl.arange(0, BP)
    live = n < N
    mask = (part < parts)[:, None] & live[None, :]
    at = part[:, None] * N + n[None, :]
    top = tl.load(tops + at, mask=mask, other=float("-inf"))
    highest = tl.max(top, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.load(totals + at, mask=mask, other=0.0) * tl.exp(top - base[None, :]), axis=0)
    log_sum = highest + tl.log(tl.where(live, total, 1.0))
    target = tl.load(targets + n, mask=live, other=_NO_TARGET)
    counts = live & (target >= 0) & (target < classes)
    right = tl.load(logits + target * to_class + n * to_token, mask=counts, other=0.0)
    tl.store(lse + n, log_sum, mask=live)
    # A class out of range gives NaN, so that the error is noticed.
    uncounted = tl.where(target == _NO_TARGET, 0.0, float("nan"))
    tl.store(losses + n, tl.where(counts, log_sum - right.to(tl.float32), uncounted), mask=live)


@triton.jit
def _back(grad, number, logits, targets, lse, d_logits, N, classes, to_token, to_class,
          BN: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    live = n < N
    mask = (c < classes)[:, None] & live[None, :]
    at = c[:, None] * to_class + n[None, :] * to_token
    v = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    log_sum = tl.load(lse + n, mask=live, other=0.0)
    target = tl.load(targets + n, mask=live, other=_NO_TARGET)
    share = tl.where(target >= 0, tl.load(grad) / tl.load(number), 0.0)
    chance = tl.exp(v - log_sum[None, :]) - tl.where(c[:, None] == target[None, :], 1.0, 0.0)
    tl.store(d_logits + at, (share[None, :] * chance).to(d_logits.dtype.element_ty), mask=mask)


def _slices(classes: int) -> tuple[int, int]:
    """The number of slices of the classes, and the length of each.

    With many classes and few tokens, most of a GPU would be idle without.
    """
    parts = min(16, triton.cdiv(classes, 2 * BC))
    return parts, triton.cdiv(triton.cdiv(classes, parts), BC) * BC


def _laid_out_like(flat: Tensor) -> Tensor:
    """An empty tensor with the shape and the strides of another, which may be a view."""
    return torch.empty_strided(flat.shape, flat.stride(), device=flat.device, dtype=flat.dtype)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        N, classes = targets.numel(), logits.shape[-1]
        flat = logits.flatten(0, 1)
        targets = targets.contiguous()
        strides = flat.stride()
        parts, slice = _slices(classes)
        tops, totals = torch.empty(2, parts, N, device=logits.device, dtype=torch.float32)
        losses, lse = torch.empty(2, N, device=logits.device, dtype=torch.float32)
        blocks = triton.cdiv(N, BN)
        _partial[(blocks, parts)](flat, tops, totals, N, classes, slice, *strides, BN, BC)
        _join[(blocks,)](
            flat, targets, tops, totals, losses, lse, N, classes, parts, *strides, BN, 16
        )
        number = (targets != NO_TARGET).sum().float()
        ctx.save_for_backward(flat, targets, lse, number)
        ctx.shape = logits.shape
        return losses.sum() / number

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        flat, targets, lse, number = ctx.saved_tensors
        N, classes = flat.shape
        d_flat = _laid_out_like(flat)
        grid = (triton.cdiv(N, BN), triton.cdiv(classes, BC))
        strides = flat.stride()
        _back[grid](grad, number, flat, targets, lse, d_flat, N, classes, *strides, BN, BC)
        return d_flat.view(ctx.shape), None


@triton.jit
def _soft_partial(logits, teacher, sums, N, classes, slice, to_token, to_class, from_token,
                  from_class, BN: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Over one slice: as `_partial` of both, and the sum of exp(teacher - its largest) logit."""
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    live = n < N
    top = tl.full((BN,), float("-inf"), tl.float32)
    total = tl.zeros((BN,), tl.float32)
    peak = tl.full((BN,), float("-inf"), tl.float32)
    weight, dot = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    end = tl.minimum((part + 1) * slice, classes)
    for start in range(part * slice, end, BC):
        c = start + tl.arange(0, BC).to(tl.int64)
        mask = (c < end)[:, None] & live[None, :]
        at = logits + c[:, None] * to_class + n[None, :] * to_token
        v = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
        at = teacher + c[:, None] * from_class + n[None, :] * from_token
        t = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(v, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(v - base[None, :]), axis=0)
        top = higher
        higher = tl.maximum(peak, tl.max(t, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        chance = tl.exp(t - base[None, :])
        fade = tl.exp(peak - base)
        weight = weight * fade + tl.sum(chance, axis=0)
        # A class that the teacher excludes counts nothing, whatever its logit.
        dot = dot * fade + tl.sum(chance * tl.where(chance > 0, v, 0.0), axis=0)
        peak = higher
    to = sums + part * N + n
    step = tl.num_programs(1) * N
    tl.store(to, top, mask=live)
    tl.store(to + step, total, mask=live)
    tl.store(to + 2 * step, peak, mask=live)
    tl.store(to + 3 * step, weight, mask=live)
    tl.store(to + 4 * step, dot, mask=live)


@triton.jit
def _soft_join(sums, losses, lse, teacher_lse, N, parts, BN: tl.constexpr, BP: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    part = tl.arange(0, BP)
    live = n < N
    mask = (part < parts)[:, None] & live[None, :]
    at = sums + part[:, None] * N + n[None, :]
    step = parts * N
    top = tl.load(at, mask=mask, other=float("-inf"))
    highest = tl.max(top, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.load(at + step, mask=mask, other=0.0) * tl.exp(top - base[None, :])
    log_sum = highest + tl.log(tl.where(live, tl.sum(total, axis=0), 1.0))
    peak = tl.load(at + 2 * step, mask=mask, other=float("-inf"))
    highest = tl.max(peak, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    fade = tl.exp(peak - base[None, :])
    weight = tl.sum(tl.load(at + 3 * step, mask=mask, other=0.0) * fade, axis=0)
    dot = tl.sum(tl.load(at + 4 * step, mask=mask, other=0.0) * fade, axis=0)
    weight = tl.where(live, weight, 1.0)
    tl.store(losses + n, log_sum - dot / weight, mask=live)
    tl.store(lse + n, log_sum, mask=live)
    tl.store(teacher_lse + n, highest + tl.log(weight), mask=live)


@triton.jit
def _soft_back(grad, number, logits, teacher, targets, lse, teacher_lse, d_logits, N, classes,
               to_token, to_class, from_token, from_class,
               BN: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    live = n < N
    mask = (c < classes)[:, None] & live[None, :]
    at = c[:, None] * to_class + n[None, :] * to_token
    v = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    there = teacher + c[:, None] * from_class + n[None, :] * from_token
    t = tl.load(there, mask=mask, other=float("-inf")).to(tl.float32)
    own = tl.exp(v - tl.load(lse + n, mask=live, other=0.0)[None, :])
    wanted = tl.exp(t - tl.load(teacher_lse + n, mask=live, other=0.0)[None, :])
    target = tl.load(targets + n, mask=live, other=_NO_TARGET)
    share = tl.where(target != _NO_TARGET, tl.load(grad) / tl.load(number), 0.0)
    d = share[None, :] * (own - wanted)
    tl.store(d_logits + at, d.to(d_logits.dtype.element_ty), mask=mask)


class SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, teacher, targets=None):
        flat, other = logits.flatten(0, 1), teacher.flatten(0, 1)
        N, classes = flat.shape
        if targets is None:
            targets = torch.zeros(N, device=logits.device, dtype=torch.long)
        targets = targets.flatten().contiguous()
        parts, slice = _slices(classes)
        sums = torch.empty(5, parts, N, device=logits.device, dtype=torch.float32)
        losses, lse, wanted = torch.empty(3, N, device=logits.device, dtype=torch.float32)
        strides = *flat.stride(), *other.stride()
        blocks = triton.cdiv(N, BN)
        _soft_partial[(blocks, parts)](flat, other, sums, N, classes, slice, *strides, BN, BC)
        _soft_join[(blocks,)](sums, losses, lse, wanted, N, parts, BN, 16)
        number = (targets != NO_TARGET).sum().float()
        ctx.save_for_backward(flat, other, targets, lse, wanted, number)
        ctx.shape = logits.shape
        # With all targets, times exactly one.
        return losses.masked_fill(targets == NO_TARGET, 0.0).mean() * (N / number)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        flat, other, targets, lse, wanted, number = ctx.saved_tensors
        N, classes = flat.shape
        d_flat = _laid_out_like(flat)
        grid = (triton.cdiv(N, BN), triton.cdiv(classes, BC))
        strides = *flat.stride(), *other.stride()
        _soft_back[grid](
            grad, number, flat, other, targets, lse, wanted, d_flat, N, classes, *strides, BN, BC
        )
        return d_flat.view(ctx.shape), None, None
