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


@triton.jit
def _elements(places, k, numel, wide):
    """Of elements k of a padded matrix: their places in flat storage, and which are no padding."""
    row, col = k // wide, k % wide
    real = (k < numel) & (row < tl.load(places + 1)) & (col < tl.load(places + 2))
    return tl.load(places) + row * tl.load(places + 3) + col * tl.load(places + 4), real


@triton.jit(do_not_specialize=["numel", "wide"])
def _gather(momentum, gradient, rho, places, batch, parts, numel, wide, BLOCK: tl.constexpr):
    """m + rho r of padded matrices, and partial sums of their squares."""
    program, count = tl.program_id(0), tl.num_programs(0)
    first = tl.program_id(1).to(tl.int64) * numel
    strength = tl.load(rho)
    square = tl.zeros((BLOCK,), tl.float32)
    for start in range(program * BLOCK, numel, count * BLOCK):
        k = start + tl.arange(0, BLOCK)
        i, real = _elements(places + 5 * tl.program_id(1), k, numel, wide)
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


@triton.jit(do_not_specialize=["numel", "wide"])
def _scatter(weight, update, scale, lr, places, numel, wide, BLOCK: tl.constexpr):
    """Every element has one position in one matrix, so none is written twice."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1).to(tl.int64) * numel + k
    i, real = _elements(places + 5 * tl.program_id(1), k, numel, wide)
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
    places: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    tiny: float,
) -> Tensor:
    """m + rho r of matrices [matrices, *shape], padded with zeros, each divided by its norm.

    `places` [matrices, 5] are the start of each in flat storage, its numbers of rows and columns,
    and their strides.
    """
    numel, matrices = shape[0] * shape[1], len(places)
    grid = (*blocks(numel), matrices)
    count = min(PARTS, grid[0])
    batch = momentum.new_empty(matrices, *shape)
    parts = momentum.new_empty(count * matrices)
    _gather[(count, matrices)](
        momentum, gradient, rho, places, batch, parts, numel, shape[1], BLOCK
    )
    out = torch.empty_like(batch, dtype=dtype)
    _normalise[grid](batch, parts, out, numel, count, tiny, PARTS, BLOCK)
    return out


def scatter_(weight: Tensor, update: Tensor, scale: Tensor, lr: Tensor, places: Tensor) -> None:
    """weight -= lr scale update, with update [matrices, rows, cols] at `places`."""
    numel = update[0].numel()
    grid = (*blocks(numel), len(update))
    _scatter[grid](weight, update, scale, lr, places, numel, update.shape[2], BLOCK)
