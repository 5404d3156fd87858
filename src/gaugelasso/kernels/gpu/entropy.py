"""Cross-entropy: partial sums over slices of the classes, their combination, the gradient."""

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


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        N, classes = targets.numel(), logits.shape[-1]
        flat = logits.flatten(0, 1)
        targets = targets.contiguous()
        strides = flat.stride()
        # Classes are split too: with many classes and few tokens, most of a GPU would be idle.
        parts = min(16, triton.cdiv(classes, 2 * BC))
        tops, totals = torch.empty(2, parts, N, device=logits.device, dtype=torch.float32)
        losses, lse = torch.empty(2, N, device=logits.device, dtype=torch.float32)
        slice = triton.cdiv(triton.cdiv(classes, parts), BC) * BC
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
        d_flat = torch.empty_strided(
            flat.shape, flat.stride(), device=flat.device, dtype=flat.dtype
        )
        grid = (triton.cdiv(N, BN), triton.cdiv(classes, BC))
        strides = flat.stride()
        _back[grid](grad, number, flat, targets, lse, d_flat, N, classes, *strides, BN, BC)
        return d_flat.view(ctx.shape), None
