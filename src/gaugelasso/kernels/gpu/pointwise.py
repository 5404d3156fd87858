"""SwiGLU, element by element."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1024


@triton.jit
def _swiglu(both, out, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    up = tl.load(both + i, mask=i < size, other=0.0).to(tl.float32)
    gate = tl.load(both + size + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out + i, (up * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=i < size)


@triton.jit
def _swiglu_back(grad, both, d_both, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    up = tl.load(both + i, mask=i < size, other=0.0).to(tl.float32)
    gate = tl.load(both + size + i, mask=i < size, other=0.0).to(tl.float32)
    g = tl.load(grad + i, mask=i < size, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    d_up = g * gate * share
    d_gate = g * up * share * (1 + gate * (1 - share))
    tl.store(d_both + i, d_up.to(d_both.dtype.element_ty), mask=i < size)
    tl.store(d_both + size + i, d_gate.to(d_both.dtype.element_ty), mask=i < size)


class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both):
        both = both.contiguous()
        out = both.new_empty(both.shape[0] // 2, both.shape[1])
        _swiglu[(triton.cdiv(out.numel(), BLOCK),)](both, out, out.numel(), BLOCK)
        ctx.save_for_backward(both)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (both,) = ctx.saved_tensors
        d_both = torch.empty_like(both)
        size = grad.numel()
        _swiglu_back[(triton.cdiv(size, BLOCK),)](grad.contiguous(), both, d_both, size, BLOCK)
        return d_both
