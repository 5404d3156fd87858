"""Rotates, transposes and pads projected rows into heads, and the inverse for gradients.

The two halves of a RoPE pair become adjacent. Queries and keys use the same order, so that
their products are unchanged.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gaugelasso.kernels.dispatch import ALIGN, aligned

BT = 64
_WIDTHS = ["d_k", "d_v", "eights_k", "eights_v", "start_k", "start_v"]
_STRIDES = ["qb", "qh", "qs", "kb", "kh", "ks", "vb", "vh", "vs"]


@triton.jit
def _angles(frequencies, cos, sin, S, BS: tl.constexpr):
    """cos and sin of t f_p, [P, S]: the same for all heads and sequences."""
    p = tl.program_id(0)
    t = tl.program_id(1) * BS + tl.arange(0, BS)
    angle = tl.load(frequencies + p) * t.to(tl.float32)
    tl.store(cos + p * S + t, tl.cos(angle), mask=t < S)
    tl.store(sin + p * S + t, tl.sin(angle), mask=t < S)


@triton.jit(do_not_specialize=_WIDTHS)
def _split(rows, q, k, v, cos, sin, N, S, heads, groups, d_k, d_v, eights_k, eights_v,
           start_k, start_v, TURN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
           BT: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * BT + tl.arange(0, BT)
    kind, lane, lanes = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    live = n < N
    if kind < 2:
        wide = eights_k * 8
        half = d_k // 2 if TURN else d_k
        p = tl.arange(0, BK)
        inside = (p < half)[:, None] & live[None, :]
        if kind == 0:
            source, to, count = rows, q, heads
        else:
            source, to, count = rows + start_k * N, k, groups
        if TURN:
            at = p[:, None] * S + (n % S)[None, :]
            c = tl.load(cos + at, mask=inside, other=0.0)
            s = tl.load(sin + at, mask=inside, other=0.0)
        for h in range(lane, count, lanes):
            here = source + (h * d_k + p)[:, None] * N + n[None, :]
            first = tl.load(here, mask=inside, other=0.0)
            row = to + (n * count + h) * wide
            if TURN:
                second = tl.load(here + half * N, mask=inside, other=0.0)
                one, two = first.to(tl.float32), second.to(tl.float32)
                first = (one * c - two * s).to(q.dtype.element_ty)
                second = (one * s + two * c).to(q.dtype.element_ty)
                both = tl.interleave(tl.trans(first), tl.trans(second))
                column = tl.arange(0, 2 * BK)
                tl.store(row[:, None] + column[None, :], both, mask=live[:, None] & (column < wide))
            else:
                tl.store(
                    row[:, None] + p[None, :], tl.trans(first), mask=live[:, None] & (p < wide)
                )
    else:
        c_v = tl.arange(0, BV)
        known = (c_v < d_v)[:, None] & live[None, :]
        full = live[:, None] & (c_v < eights_v * 8)
        for g in range(lane, groups, lanes):
            rest = rows + (start_v + g * d_v + c_v)[:, None] * N + n[None, :]
            value = tl.load(rest, mask=known, other=0.0)
            place = v + (n * groups + g) * (eights_v * 8)
            tl.store(place[:, None] + c_v[None, :], tl.trans(value), mask=full)


@triton.jit(do_not_specialize=_WIDTHS + _STRIDES)
def _split_back(d_q, d_k_, d_v_, d_rows, cos, sin, N, S, heads, groups, d_k, d_v,
          eights_k, eights_v, start_k, start_v, qb, qh, qs, kb, kh, ks, vb, vh, vs,
          TURN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * BT + tl.arange(0, BT)
    kind, lane, lanes = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    live = n < N
    b, t = n // S, n % S
    if kind < 2:
        half = d_k // 2 if TURN else d_k
        p = tl.arange(0, BK)
        inside = (p < half)[:, None] & live[None, :]
        if kind == 0:
            to, count, step = d_rows, heads, qh
            source = d_q + (b * qb + t * qs) * 8
        else:
            to, count, step = d_rows + start_k * N, groups, kh
            source = d_k_ + (b * kb + t * ks) * 8
        if TURN:
            at = p[:, None] * S + t[None, :]
            c = tl.load(cos + at, mask=inside, other=0.0)
            s = tl.load(sin + at, mask=inside, other=0.0)
        for h in range(lane, count, lanes):
            here = source + h * step * 8
            where = to + (h * d_k + p)[:, None] * N + n[None, :]
            if TURN:
                column = tl.arange(0, 2 * BK)
                mask = live[:, None] & (column < eights_k * 8)
                both = tl.load(here[:, None] + column[None, :], mask=mask, other=0.0)
                first, second = tl.split(tl.reshape(both, (BT, BK, 2)))
                one = tl.trans(first).to(tl.float32)
                two = tl.trans(second).to(tl.float32)
                tl.store(where, (one * c + two * s).to(d_rows.dtype.element_ty), mask=inside)
                turned = (two * c - one * s).to(d_rows.dtype.element_ty)
                tl.store(where + half * N, turned, mask=inside)
            else:
                alone = tl.load(
                    here[:, None] + p[None, :], mask=live[:, None] & (p < eights_k * 8), other=0.0
                )
                tl.store(where, tl.trans(alone), mask=inside)
    else:
        c_v = tl.arange(0, BV)
        known = (c_v < d_v)[:, None] & live[None, :]
        full = live[:, None] & (c_v < eights_v * 8)
        base = d_v_ + (b * vb + t * vs) * 8
        for g in range(lane, groups, lanes):
            value = tl.load((base + g * vh * 8)[:, None] + c_v[None, :], mask=full, other=0.0)
            rest = d_rows + (start_v + g * d_v + c_v)[:, None] * N + n[None, :]
            tl.store(rest, tl.trans(value), mask=known)


def _blocks(d_k: int, d_v: int, turn: bool) -> tuple[int, int]:
    half = aligned(d_k) // 2 if turn else aligned(d_k)
    return max(16, triton.next_power_of_2(half)), max(16, triton.next_power_of_2(d_v))


def _grid(N: int, heads: int) -> tuple[int, int, int]:
    """Blocks of tokens; queries, keys and values; lanes, among which heads are distributed."""
    lanes = 1 if N >= 2**15 else heads
    return triton.cdiv(N, BT), 3, lanes


def _is_aligned(heads: Tensor) -> bool:
    """Whether channels are contiguous and every other stride is a multiple of ALIGN."""
    *strides, last = heads.stride()
    return last == 1 and not any(step % ALIGN for step in strides)


class SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, batch, heads, groups, d_k, d_v, frequencies):
        rows = rows.contiguous()
        N = rows.shape[1]
        S = N // batch
        wide_k, wide_v = aligned(d_k), aligned(d_v)
        q = rows.new_empty(batch, S, heads, wide_k)
        k = rows.new_empty(batch, S, groups, wide_k)
        v = rows.new_empty(batch, S, groups, wide_v)
        turn = frequencies is not None
        table = torch.empty(2, d_k // 2, S, device=rows.device) if turn else None
        if table is not None:
            _angles[(d_k // 2, triton.cdiv(S, 128))](frequencies, *table, S, 128)
        starts = aligned(heads * d_k), aligned(heads * d_k) + aligned(groups * d_k)
        _split[_grid(N, heads)](
            rows, q, k, v, *(table if table is not None else (q, q)), N, S, heads, groups, d_k, d_v,
            wide_k // ALIGN, wide_v // ALIGN, *starts, turn, *_blocks(d_k, d_v, turn), BT,
        )  # fmt: skip
        ctx.save_for_backward(table)
        ctx.sizes = heads, groups, d_k, d_v, starts
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_q: Tensor, d_k_: Tensor, d_v_: Tensor):
        (table,) = ctx.saved_tensors
        heads, groups, d_k, d_v, starts = ctx.sizes
        parts = [g if _is_aligned(g) else g.contiguous() for g in (d_q, d_k_, d_v_)]
        batch, _, S, _ = d_q.shape
        N = batch * S
        ends = heads * d_k, starts[0] + groups * d_k, starts[1] + groups * d_v
        d_rows = d_q.new_empty(starts[1] + aligned(groups * d_v), N)
        for end in ends:  # padding is multiplied by zero, so it must not be NaN
            if aligned(end) > end:
                d_rows[end : aligned(end)].zero_()
        turn = table is not None
        strides = [step // ALIGN for part in parts for step in part.stride()[:3]]
        _split_back[_grid(N, heads)](
            *parts, d_rows, *(table if turn else (d_rows, d_rows)), N, S, heads, groups, d_k, d_v,
            aligned(d_k) // ALIGN, aligned(d_v) // ALIGN, *starts, *strides, turn,
            *_blocks(d_k, d_v, turn), BT,
        )  # fmt: skip
        return d_rows, None, None, None, None, None, None
