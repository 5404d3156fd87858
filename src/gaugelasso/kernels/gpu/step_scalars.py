"""The scalars of a step: sums over flat storage, then one program that computes with them.

The sums are deterministic, and equal on every rank: each program stores its partial sum, and the
next kernel adds the partial sums in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.gpu.flat import lerp

# Largest number of programs of a sum, elements that one adds at a time, and its warps: enough to
# read at full bandwidth, few enough for one warp to add the partial sums.
PARTS, BLOCK, WARPS = 512, 2048, 8


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["x"])
def _squares(x, parts, N, BLOCK: tl.constexpr):
    """Partial sums of x^2."""
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(program.to(tl.int64) * BLOCK, N, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(x + i, mask=i < N, other=0.0)
        total += v * v
    tl.store(parts + program, tl.sum(total))


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["momentum", "gradient"])
def _opposed(momentum, gradient, parts, N, BLOCK: tl.constexpr):
    """Partial sums of <sign m, r>, ||r||_1 and ||m||_1."""
    program, count = tl.program_id(0), tl.num_programs(0)
    along = tl.zeros((BLOCK,), tl.float32)
    pull = tl.zeros((BLOCK,), tl.float32)
    drive = tl.zeros((BLOCK,), tl.float32)
    for start in range(program.to(tl.int64) * BLOCK, N, count * BLOCK):
        i = start + tl.arange(0, BLOCK)
        m = tl.load(momentum + i, mask=i < N, other=0.0)
        r = tl.load(gradient + i, mask=i < N, other=0.0)
        along += ((m > 0).to(tl.float32) - (m < 0).to(tl.float32)) * r
        pull += tl.abs(r)
        drive += tl.abs(m)
    tl.store(parts + program, tl.sum(along))
    tl.store(parts + count + program, tl.sum(pull))
    tl.store(parts + 2 * count + program, tl.sum(drive))


@triton.jit
def _total(parts, count, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.sum(tl.load(parts + part, mask=part < count, other=0.0))


# The loss may be stored after the gradients that ranks exchange, so its alignment changes.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["loss", "parts"])
def _check_finite(loss, parts, count, skipped, failing, streak, smoothed, seen, sound, beta,
           SMOOTH: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    value = tl.load(loss).to(tl.float32)
    square = _total(parts, count, PARTS)
    # Both comparisons are false for NaN.
    finite = (tl.abs(value) < float("inf")) & (square < float("inf"))
    bad = tl.where(finite, 0.0, 1.0)
    row = (tl.load(failing) + 1) * bad
    tl.store(skipped, tl.load(skipped) + bad)
    tl.store(failing, row)
    tl.store(streak, tl.maximum(tl.load(streak), row))
    average, number = tl.load(smoothed), tl.load(seen)
    if SMOOTH:
        value = tl.where(number > 0, lerp(value, average, beta), value)
    tl.store(smoothed, tl.where(finite, value, average))
    tl.store(seen, number + 1 - bad)
    tl.store(sound, finite)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["parts"])
def _solve_rho(parts, count, sound, smoothed, lr, pressure, rho, pressed, begun, rates,
           loss_target, fixed, opposition, tiny, norm_rate,
           METHOD: tl.constexpr, PAUSE: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    finite = tl.where(tl.load(sound), 1.0, 0.0)
    rate = tl.load(lr)
    if METHOD == "fixed":
        strength = fixed
    else:
        opposed, pull = -_total(parts, count, PARTS), _total(parts + count, count, PARTS)
        margin = tl.load(loss_target) - tl.load(smoothed)
        if METHOD == "sign_step":
            margin += rate * _total(parts + 2 * count, count, PARTS)
        opposed = tl.maximum(opposed, opposition * pull)
        spent = margin / tl.maximum(rate * opposed, tiny)
        strength = tl.where((margin > 0) & (opposed > 0), spent, 0.0)
    strength = strength * tl.load(pressure) * finite
    pressing = tl.where(strength > 0, 1.0, 0.0)
    ever = tl.maximum(tl.load(begun), pressing)
    tl.store(rho, strength)
    tl.store(pressed, tl.maximum(tl.load(pressed), pressing) * finite)
    tl.store(begun, ever)
    tl.store(rates, rate * finite)
    tl.store(rates + 1, norm_rate * (pressing if PAUSE else ever) * finite)


def _programs(size: int) -> int:
    return min(PARTS, triton.cdiv(size, BLOCK))


def check_finite_(
    loss: Tensor,
    gradient: Tensor,
    smoothing: float,
    *,
    smoothed: Tensor,
    seen: Tensor,
    skipped: Tensor,
    failing: Tensor,
    streak: Tensor,
) -> Tensor:
    """Whether the loss and all gradients are finite; updates the counters and the smoothed loss."""
    size = gradient.numel()
    count = _programs(size)
    parts = gradient.new_empty(count)
    sound = torch.empty((), dtype=torch.bool, device=gradient.device)
    _squares[(count,)](gradient, parts, size, BLOCK, num_warps=WARPS)
    loss = loss.to(gradient.device)  # a custom training loop may sum its losses on the host
    _check_finite[(1,)](
        loss, parts, count, skipped, failing, streak, smoothed, seen, sound, smoothing,
        smoothing > 0, PARTS, num_warps=1,
    )  # fmt: skip
    return sound


def solve_rho_(
    momentum: Tensor,
    gradient: Tensor,
    sound: Tensor,
    *,
    smoothed: Tensor,
    lr: Tensor,
    pressure: Tensor,
    rho: Tensor,
    pressed: Tensor,
    begun: Tensor,
    method: str,
    loss_target: Tensor,
    fixed: float,
    opposition: float,
    tiny: float,
    norm_rate: float,
    norms_pause: bool,
) -> tuple[Tensor, Tensor]:
    """The step's two rates; stores rho. `fixed` is the rho of the method "fixed"."""
    size = momentum.numel()
    count = _programs(size)
    parts, rates = momentum.new_empty(3 * count), momentum.new_empty(2)
    if method != "fixed":
        _opposed[(count,)](momentum, gradient, parts, size, BLOCK, num_warps=WARPS)
    # As floats: Triton compiles another kernel for an int.
    _solve_rho[(1,)](
        parts, count, sound, smoothed, lr, pressure, rho, pressed, begun, rates,
        loss_target, float(fixed), opposition, tiny, float(norm_rate),
        method, norms_pause, PARTS, num_warps=1,
    )  # fmt: skip
    return rates[0], rates[1]
