"""Kernels of the stream.

The stream is a single chain of operations, so that gradients are added to it in place. A copy of it
is another user: its gradient is added to the chain's before the operation behind it runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gaugelasso.kernels.dispatch import ALIGN, aligned

# Tokens and sites of a tile: 32 floats are one cache line.
BN, BD = 32, 64


# Parameters are views of one vector, and their alignment changes with the structure.
@triton.jit(do_not_specialize=["d"], do_not_specialize_on_alignment=["table", "positions", "scale"])
def _embed(tokens, table, positions, scale, sites, x, N, S, d, V, PLACED: tl.constexpr,
           BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.program_id(1) * BD + tl.arange(0, BD)
    live, real = n < N, j < d
    both = live[:, None] & real[None, :]
    token = tl.load(tokens + n, mask=live, other=0)
    known = (token >= 0) & (token < V)
    at = table + token[:, None] * d + j[None, :]
    value = tl.load(at, mask=both & known[:, None], other=0.0)
    # A token out of range gives NaN, so that the error is noticed.
    value = tl.where(known[:, None], value, float("nan"))
    if PLACED:
        value += tl.load(positions + (n % S)[:, None] * d + j[None, :], mask=both, other=0.0)
    value *= tl.load(scale + j, mask=real, other=0.0)[None, :]
    site = tl.load(sites + j, mask=real, other=0)
    where = x + site[:, None] * N + n[None, :]
    tl.store(where, tl.trans(value), mask=real[:, None] & live[None, :])


@triton.jit(do_not_specialize=["d"], do_not_specialize_on_alignment=["table", "positions", "scale"])
def _embed_back(grad, tokens, table, positions, scale, sites, d_table, d_positions, d_scale,
                B, S, d, V, PLACED: tl.constexpr, PARTS: tl.constexpr,
                BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    t = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.program_id(1) * BD + tl.arange(0, BD)
    live, real = t < S, j < d
    both = live[:, None] & real[None, :]
    site = tl.load(sites + j, mask=real, other=0)
    factor = tl.load(scale + j, mask=real, other=0.0)
    place = t[:, None] * d + j[None, :]
    start = tl.zeros((BN, BD), tl.float32)
    if PLACED:
        start += tl.load(positions + place, mask=both, other=0.0)
    here = tl.zeros((BN, BD), tl.float32)
    total = tl.zeros((BD,), tl.float32)
    for b in range(tl.program_id(2), B, PARTS):
        n = b * S + t
        where = grad + site[:, None] * (B * S) + n[None, :]
        g = tl.trans(tl.load(where, mask=real[:, None] & live[None, :], other=0.0))
        token = tl.load(tokens + n, mask=live, other=0)
        both = live[:, None] & real[None, :] & ((token >= 0) & (token < V))[:, None]
        at = token[:, None] * d + j[None, :]
        total += tl.sum(g * (start + tl.load(table + at, mask=both, other=0.0)), axis=0)
        g *= factor[None, :]
        tl.atomic_add(d_table + at, g, mask=both)
        here += g
    tl.atomic_add(d_scale + j, total, mask=real)
    if PLACED:
        tl.atomic_add(d_positions + place, here, mask=both)


@triton.jit(do_not_specialize=["d"])
def _read(x, sites, weight, out, scale, energy, N, d, eps, least, RECORD: tl.constexpr,
          BY_TOKEN: tl.constexpr, ALIGN: tl.constexpr, BN: tl.constexpr,
          BD: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.arange(0, BD)
    live, real = n < N, j < d
    site = tl.load(sites + j, mask=real, other=0)
    both = real[:, None] & live[None, :]
    v = tl.load(x + site[:, None] * N + n[None, :], mask=both, other=0.0)
    square = v * v
    level = tl.sum(tl.load(weight + j, mask=real, other=0.0)[:, None] * square, axis=0)
    level += eps
    s = tl.where(level > least, tl.rsqrt(tl.maximum(level, least)), 0.0)
    if RECORD:
        if BY_TOKEN:
            square *= (s * s)[None, :]
        tl.store(energy + tl.program_id(0) * d + j, tl.sum(square, axis=1) / N, mask=real)
    tl.store(scale + n, s, mask=live)
    padded = (j < (d + ALIGN - 1) // ALIGN * ALIGN)[:, None] & live[None, :]
    y = (v * s[None, :]).to(out.dtype.element_ty)
    tl.store(out + j[:, None] * N + n[None, :], y, mask=padded)


@triton.jit(do_not_specialize=["d"])
def _read_back(d_out, out, sites, weight, scale, grad, N, d,
               BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """grad[s_j] += scale (d_j - weight_j n_j sum_i d_i n_i)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    live = n < N
    dot = tl.zeros((BN,), tl.float32)
    for start in range(0, d, BD):
        j = start + tl.arange(0, BD)
        both = (j < d)[:, None] & live[None, :]
        at = j[:, None] * N + n[None, :]
        y = tl.load(out + at, mask=both, other=0.0).to(tl.float32)
        g = tl.load(d_out + at, mask=both, other=0.0).to(tl.float32)
        dot += tl.sum(y * g, axis=0)
    s = tl.load(scale + n, mask=live, other=0.0)
    for start in range(0, d, BD):
        j = start + tl.arange(0, BD)
        real = j < d
        both = real[:, None] & live[None, :]
        at = j[:, None] * N + n[None, :]
        y = tl.load(out + at, mask=both, other=0.0).to(tl.float32)
        g = tl.load(d_out + at, mask=both, other=0.0).to(tl.float32)
        w = tl.load(weight + j, mask=real, other=0.0)
        site = tl.load(sites + j, mask=real, other=0)
        where = grad + site[:, None] * N + n[None, :]
        old = tl.load(where, mask=both, other=0.0)
        tl.store(where, old + s[None, :] * (g - w[:, None] * y * dot[None, :]), mask=both)


@triton.jit(do_not_specialize=["d"])
def _write(x, sites, u, N, d, BD: tl.constexpr, BN: tl.constexpr):
    j = tl.program_id(0) * BD + tl.arange(0, BD)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    real = j < d
    both = real[:, None] & (n < N)[None, :]
    where = x + tl.load(sites + j, mask=real, other=0)[:, None] * N + n[None, :]
    more = tl.load(u + j[:, None] * N + n[None, :], mask=both, other=0.0).to(tl.float32)
    tl.store(where, tl.load(where, mask=both, other=0.0) + more, mask=both)


@triton.jit(do_not_specialize=["d"])
def _write_back(grad, sites, d_u, N, d, ALIGN: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    j = tl.program_id(0) * BD + tl.arange(0, BD)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    real, live = j < d, n < N
    where = grad + tl.load(sites + j, mask=real, other=0)[:, None] * N + n[None, :]
    g = tl.load(where, mask=real[:, None] & live[None, :], other=0.0)
    padded = (j < (d + ALIGN - 1) // ALIGN * ALIGN)[:, None] & live[None, :]
    tl.store(d_u + j[:, None] * N + n[None, :], g.to(d_u.dtype.element_ty), mask=padded)


def _tile(d: int) -> tuple[int, int, int]:
    """Tokens, rows and warps of a program that holds all its rows in registers."""
    rows = max(32, triton.next_power_of_2(d))
    if rows <= 128:
        return 32, rows, 4
    if rows <= 1024:
        return 16, rows, 4 if rows <= 512 else 8
    return 8, rows, 16


class Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, table, positions, scale, sites, size, dtype):
        N, d = tokens.numel(), len(sites)
        x = torch.zeros(size, N, device=table.device, dtype=table.dtype)
        tokens = tokens.contiguous()
        placed, V = positions is not None, len(table)
        grid = (triton.cdiv(N, BN), triton.cdiv(d, BD))
        at = positions if placed else table
        _embed[grid](tokens, table, at, scale, sites, x, N, tokens.shape[1], d, V, placed, BN, BD)
        ctx.save_for_backward(tokens, table, positions, scale, sites)
        ctx.dtype = dtype
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        tokens, table, positions, scale, sites = ctx.saved_tensors
        arguments = grad.contiguous(), tokens, table, positions, scale, sites
        # With few rows and many tokens, atomic additions to the same row are serialised.
        if len(table) <= 2 * len(sites):
            grads = _embed_product(*arguments, ctx.dtype)
        else:
            grads = _embed_scatter(*arguments)
        return None, *grads, None, None, None


def _embed_scatter(grad, tokens, table, positions, scale, sites):
    placed, d = positions is not None, len(sites)
    d_table, d_scale = torch.zeros_like(table), torch.zeros_like(scale)
    d_positions = torch.zeros_like(positions) if placed else None
    B, S = tokens.shape
    at, d_at = (positions, d_positions) if placed else (table, d_table)
    _embed_back[(triton.cdiv(S, BN), triton.cdiv(d, BD), 32)](
        grad, tokens, table, at, scale, sites, d_table, d_at, d_scale, B, S, d, len(table), placed,
        32, BN, BD,
    )  # fmt: skip
    return d_table, d_positions, d_scale


def _embed_product(grad, tokens, table, positions, scale, sites, dtype):
    """Gradients as a matrix product with one-hot tokens."""
    B, S = tokens.shape
    d = len(sites)
    rows = _gathered(grad, sites, dtype)
    hot = torch.zeros(aligned(len(table)), B * S, device=grad.device, dtype=dtype)
    hot.scatter_(0, tokens.view(1, -1), 1.0)
    folded = (hot @ rows.T)[: len(table), :d].float()
    d_scale = (folded * table).sum(0)
    d_positions = None
    if positions is not None:
        placed = rows[:d].view(d, B, S).sum(1, dtype=torch.float32).T
        d_scale += (placed * positions[:S]).sum(0)
        d_positions = torch.zeros_like(positions)
        d_positions[:S] = placed * scale
    return folded * scale, d_positions, d_scale


def _gathered(grad: Tensor, sites: Tensor, dtype: torch.dtype) -> Tensor:
    """The stream's gradient at some sites, padded with zero rows."""
    d, N = len(sites), grad.shape[1]
    rows = torch.empty(aligned(d), N, device=grad.device, dtype=dtype)
    grid = (triton.cdiv(aligned(d), Write.ROWS), triton.cdiv(N, Write.COLUMNS))
    _write_back[grid](grad, sites, rows, N, d, ALIGN, Write.ROWS, Write.COLUMNS)
    return rows


class Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, sites, energy, by_token, eps, least, dtype):
        d, N = len(sites), x.shape[1]
        out = torch.empty(aligned(d), N, device=x.device, dtype=dtype)
        scale = torch.empty(N, device=x.device, dtype=torch.float32)
        record = energy is not None
        tokens, rows, warps = _tile(d)
        blocks = triton.cdiv(N, tokens)
        # A partial sum for each program: faster than atomics, and deterministic.
        parts = torch.empty(blocks, d, device=x.device) if record else scale
        _read[(blocks,)](
            x, sites, weight, out, scale, parts, N, d, eps, least, record, by_token, ALIGN, tokens,
            rows, num_warps=warps,
        )  # fmt: skip
        if record:
            torch.sum(parts, 0, out=energy)
        ctx.save_for_backward(out, sites, weight, scale)
        # Returned unchanged, but as a new node of the graph: so backward gets the complete
        # gradient of the stream and can add to it.
        ctx.mark_dirty(x)
        return x, out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, d_out: Tensor):
        out, sites, weight, scale = ctx.saved_tensors
        d, N = len(sites), out.shape[1]
        grad = grad.contiguous()
        tokens = 128 if N >= 2**15 else 32  # longer rows, if there are enough programs
        _read_back[(triton.cdiv(N, tokens),)](
            d_out.contiguous(), out, sites, weight, scale, grad, N, d, tokens, 64
        )
        return grad, None, None, None, None, None, None, None


class Write(torch.autograd.Function):
    """`u` may have padding rows after those of the sites."""

    ROWS, COLUMNS = 8, 256

    @staticmethod
    def forward(ctx, x, sites, u):
        ctx.mark_dirty(x)
        d, N = len(sites), x.shape[1]
        grid = (triton.cdiv(d, Write.ROWS), triton.cdiv(N, Write.COLUMNS))
        _write[grid](x, sites, u.contiguous(), N, d, Write.ROWS, Write.COLUMNS)
        ctx.save_for_backward(sites)
        ctx.rows, ctx.dtype = u.shape[0], u.dtype
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (sites,) = ctx.saved_tensors
        grad = grad.contiguous()
        return grad, None, _gathered(grad, sites, ctx.dtype)[: ctx.rows]
