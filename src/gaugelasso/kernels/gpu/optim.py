"""The coupled optimizer: one pass for its state, one for vectors, three for each matrix batch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.gpu.flat import BLOCK, blocks, lerp

# Largest number of programs that gather one matrix. Programs that normalise it add all their sums.
PARTS = 256


@triton.jit(
    do_not_specialize=["N", "end"],
    do_not_specialize_on_alignment=["gradient", "momentum", "second"],
)
def _observe(gradient, momentum, second, decay, sound, N, end, beta, beta_second,
             BLOCK: tl.constexpr):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    i = program * BLOCK + tl.arange(0, BLOCK)
    live = i < N
    if tl.load(sound):
        g = tl.load(gradient + i, mask=live, other=0.0)
        m = tl.load(momentum + i, mask=live, other=0.0)
        tl.store(momentum + i, lerp(m, g, 1 - beta), mask=live)
        tail = live & (i >= end)
        v = tl.load(second + (i - end), mask=tail, other=0.0)
        tl.store(second + (i - end), lerp(v, g * g, 1 - beta_second), mask=tail)
        if program == 0:
            tl.store(decay, tl.load(decay) * beta)
            tl.store(decay + 1, tl.load(decay + 1) * beta_second)
    else:
        tl.store(gradient + i, tl.zeros((BLOCK,), tl.float32), mask=live)


@triton.jit(
    do_not_specialize=["N", "end"],
    do_not_specialize_on_alignment=["weight", "momentum", "second", "gradient", "rates"],
)
def _advance(weight, momentum, second, gradient, rho, decay, rates, N, end, weight_decay, tiny,
             EACH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = end + k
    live = i < N
    rate = tl.load(rates + k, mask=live, other=0.0) if EACH else tl.load(rates)
    push = tl.load(rho) * tl.load(gradient + i, mask=live, other=0.0)
    first = tl.maximum(1 - tl.load(decay), tiny)
    last = tl.maximum(1 - tl.load(decay + 1), tiny)
    aim = tl.load(momentum + i, mask=live, other=0.0) / first + push
    spread = tl.sqrt_rn(tl.load(second + k, mask=live, other=0.0) / last + push * push)
    update = tl.clamp(aim / (spread + tiny), -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)
    w = tl.load(weight + i, mask=live, other=0.0) * (1 - rate * weight_decay)
    tl.store(weight + i, w - rate * update, mask=live)


@triton.jit(do_not_specialize=["size", "numel"])
def _gather(momentum, gradient, rho, index, batch, parts, size, numel, BLOCK: tl.constexpr):
    """m + rho r of padded matrices, and partial sums of their squares."""
    program, count = tl.program_id(0), tl.num_programs(0)
    first = tl.program_id(1).to(tl.int64) * numel
    strength = tl.load(rho)
    square = tl.zeros((BLOCK,), tl.float32)
    for start in range(program * BLOCK, numel, count * BLOCK):
        k = start + tl.arange(0, BLOCK)
        i = tl.load(index + first + k, mask=k < numel, other=size)
        real = i < size
        m = tl.load(momentum + i, mask=real, other=0.0)
        v = m + strength * tl.load(gradient + i, mask=real, other=0.0)
        tl.store(batch + first + k, v, mask=k < numel)
        square += v * v
    tl.store(parts + tl.program_id(1) * count + program, tl.sum(square))


@triton.jit(do_not_specialize=["numel", "count"])
def _normalise(batch, parts, out, numel, count, tiny, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1).to(tl.int64) * numel + k
    part = tl.arange(0, PARTS)
    square = tl.load(parts + tl.program_id(1) * count + part, mask=part < count, other=0.0)
    v = tl.load(batch + at, mask=k < numel, other=0.0) / (tl.sqrt_rn(tl.sum(square)) + tiny)
    tl.store(out + at, v.to(out.dtype.element_ty), mask=k < numel)


@triton.jit(do_not_specialize=["size", "numel"])
def _scatter(weight, update, scale, lr, index, size, numel, BLOCK: tl.constexpr):
    """Every element has one position in one matrix, so none is written twice."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1).to(tl.int64) * numel + k
    i = tl.load(index + at, mask=k < numel, other=size)
    real = i < size
    step = tl.load(scale + tl.program_id(1)) * tl.load(update + at, mask=real, other=0.0)
    w = tl.load(weight + i, mask=real, other=0.0)
    tl.store(weight + i, w - tl.load(lr) * step, mask=real)


def observe_(
    gradient: Tensor,
    momentum: Tensor,
    second: Tensor,
    decay: Tensor,
    sound: Tensor,
    betas: tuple[float, float],
) -> None:
    size = gradient.numel()
    end = size - second.numel()
    _observe[blocks(size)](gradient, momentum, second, decay, sound, size, end, *betas, BLOCK)


def advance_(
    weight: Tensor,
    momentum: Tensor,
    second: Tensor,
    gradient: Tensor,
    rho: Tensor,
    decay: Tensor,
    rates: Tensor,
    weight_decay: float,
    tiny: float,
) -> None:
    size, tail = weight.numel(), second.numel()
    _advance[blocks(tail)](
        weight, momentum, second, gradient, rho, decay, rates, size, size - tail, weight_decay,
        tiny, rates.dim() > 0, BLOCK,
    )  # fmt: skip


def gather(
    momentum: Tensor,
    gradient: Tensor,
    rho: Tensor,
    index: Tensor,
    size: int,
    dtype: torch.dtype,
    tiny: float,
) -> Tensor:
    """m + rho r at `index` [matrices, rows, cols], each matrix divided by its norm."""
    numel = index[0].numel()
    grid = (*blocks(numel), len(index))
    count = min(PARTS, grid[0])
    batch = torch.empty(index.shape, device=index.device, dtype=momentum.dtype)
    parts = momentum.new_empty(count * len(index))
    _gather[(count, len(index))](momentum, gradient, rho, index, batch, parts, size, numel, BLOCK)
    out = torch.empty_like(batch, dtype=dtype)
    _normalise[grid](batch, parts, out, numel, count, tiny, PARTS, BLOCK)
    return out


def scatter_(
    weight: Tensor, update: Tensor, scale: Tensor, lr: Tensor, index: Tensor, size: int
) -> None:
    """weight -= lr scale update, with update [matrices, rows, cols] at `index`."""
    numel = index[0].numel()
    grid = (*blocks(numel), len(index))
    _scatter[grid](weight, update, scale, lr, index, size, numel, BLOCK)
