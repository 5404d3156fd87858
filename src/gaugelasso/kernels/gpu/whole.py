"""A whole operator of a decoding step in one kernel: fewer launches to wait for.

Programs share an operator by heads or filters. Each adds up its part of what is written, and the
last one to finish adds all parts to the stream, in a fixed order: the result does not depend on
which one that is. References: `inference.operators.Attention.step` and `Mlp` in parts.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.dispatch import check_offsets
from gaugelasso.kernels.gpu.decoding import attention_launch, over_cache
from gaugelasso.kernels.gpu.levels import _factor
from gaugelasso.kernels.gpu.products import _dot, _swish
from gaugelasso.kernels.stream import EPS

# Sequences of a block, which is the least that tensor cores multiply.
BLOCK = 16


@triton.jit
def _finish(x, parts, targets, counter, n, many, N, w, ld, x_token, x_site, stop,
            BP: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """After its part [many, N, w] is stored: the last of `many` programs adds all of them to x.

    Rows from n to `stop`. The counter is zero again for the next launch.
    """
    tl.debug_barrier()  # all threads have stored
    ticket = tl.atomic_add(counter, 1, sem="acq_rel")
    if ticket == many - 1:
        i, j = tl.arange(0, BP), tl.arange(0, BR)
        for row in range(n, stop):
            for start in range(0, w, BR):
                column = start + j
                real = column < w
                at = parts + (i * N + row)[:, None] * ld + column[None, :]
                inside = (i < many)[:, None] & real[None, :]
                every = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
                to = x + row * x_token + tl.load(targets + column, mask=real, other=0) * x_site
                old = tl.load(to, mask=real, other=0.0).to(tl.float32)
                new = old + tl.sum(every, axis=0)
                tl.store(to, new.to(x.dtype.element_ty), mask=real)
        tl.store(counter, 0)


@triton.jit
def _mlp(x, sites, weight, maps, down, targets, parts, counters, N, d, f, w, ld, x_token, x_site,
         eps, least, chunks, BM: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
         BP: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """BF filters of BM tokens."""
    block, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    n = block * BM + tl.arange(0, BM)
    j = chunk * BF + tl.arange(0, BF)
    live, wanted = n < N, j < f
    level = tl.zeros((BM,), tl.float32)
    up = tl.zeros((BM, BF), tl.float32)
    gate = tl.zeros((BM, BF), tl.float32)
    for start in range(0, d, BK):
        k = start + tl.arange(0, BK)
        real = k < d
        site = tl.load(sites + k, mask=real, other=0)
        at = x + n[:, None] * x_token + site[None, :] * x_site
        rows = tl.load(at, mask=live[:, None] & real[None, :], other=0.0)
        values = rows.to(tl.float32)
        share = tl.load(weight + k, mask=real, other=0.0)
        level += tl.sum(values * values * share[None, :], axis=1)
        inside = real[:, None] & wanted[None, :]
        map_at = maps + k[:, None] * (2 * f) + j[None, :]
        up = _dot(rows, tl.load(map_at, mask=inside, other=0.0), up)
        gate = _dot(rows, tl.load(map_at + f, mask=inside, other=0.0), gate)
    factor = _factor(level + eps, least)[:, None]
    h = _swish(up * factor, gate * factor).to(x.dtype.element_ty)
    for start in range(0, w, BW):
        column = start + tl.arange(0, BW)
        inside = wanted[:, None] & (column < ld)[None, :]
        tile = tl.load(down + j[:, None] * ld + column[None, :], mask=inside, other=0.0)
        part = _dot(h, tile, tl.zeros((BM, BW), tl.float32))
        at = parts + (chunk * N + n)[:, None] * ld + column[None, :]
        tl.store(at, part, mask=live[:, None] & (column < w)[None, :])
    stop = tl.minimum(block * BM + BM, N)
    _finish(x, parts, targets, counters + block, block * BM, chunks, N, w, ld, x_token, x_site,
            stop, BP, BR)  # fmt: skip


@triton.jit
def _projected(x, sites, weight, maps, d, ld, x_site, q, k, v, second, half, rest, d_v, eps,
               least, BK: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """Queries, keys (two parts each) and values of one token and head, from columns q, k and v."""
    p, e = tl.arange(0, BH), tl.arange(0, BV)
    level = tl.zeros((BK,), tl.float32)
    q_one = tl.zeros((BK, BH), tl.float32)
    q_two, k_one, k_two = q_one, q_one, q_one
    value = tl.zeros((BK, BV), tl.float32)
    for start in range(0, d, BK):
        row = start + tl.arange(0, BK)
        real = row < d
        site = tl.load(sites + row, mask=real, other=0)
        read = tl.load(x + site * x_site, mask=real, other=0.0).to(tl.float32)
        level += read * read * tl.load(weight + row, mask=real, other=0.0)
        at = maps + row[:, None] * ld + p[None, :]
        early, late = real[:, None] & (p < half)[None, :], real[:, None] & (p < rest)[None, :]
        q_one += read[:, None] * tl.load(at + q, mask=early, other=0.0).to(tl.float32)
        q_two += read[:, None] * tl.load(at + q + second, mask=late, other=0.0).to(tl.float32)
        k_one += read[:, None] * tl.load(at + k, mask=early, other=0.0).to(tl.float32)
        k_two += read[:, None] * tl.load(at + k + second, mask=late, other=0.0).to(tl.float32)
        known = real[:, None] & (e < d_v)[None, :]
        v_at = maps + row[:, None] * ld + v + e[None, :]
        value += read[:, None] * tl.load(v_at, mask=known, other=0.0).to(tl.float32)
    factor = _factor(tl.sum(level, axis=0) + eps, least)
    return (
        tl.sum(q_one, axis=0) * factor,
        tl.sum(q_two, axis=0) * factor,
        tl.sum(k_one, axis=0) * factor,
        tl.sum(k_two, axis=0) * factor,
        tl.sum(value, axis=0) * factor,
    )


@triton.jit
def _attention(x, sites, weight, maps, out, targets, parts, counters, keys, values, cos, sin,
               positions, N, d, w, ld, ld_out, x_token, x_site, eps, least, heads, groups, half,
               rest, d_v, wide_k, wide_v, second, k_head, k_token, k_channel, v_head, v_token,
               v_channel, bits, TURN: tl.constexpr, ROOM: tl.constexpr, BN: tl.constexpr,
               BH: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
               BP: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """One head of one sequence, from the stream to its part of what is written."""
    b, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    share = heads // groups
    g = h // share
    count = tl.load(positions + b).to(tl.int32)
    q_one, q_two, k_one, k_two, value = _projected(
        x + b * x_token, sites, weight, maps, d, ld, x_site, h * wide_k, (heads + g) * wide_k,
        (heads + groups) * wide_k + g * wide_v, second, half, rest, d_v, eps, least, BK, BH, BV,
    )  # fmt: skip
    head = b.to(tl.int64) * groups + g
    mixed = over_cache(
        q_one, q_two, k_one, k_two, value, keys + head * k_head, values + head * v_head, cos, sin,
        count, h % share == 0, half, rest, d_v, second, k_token, k_channel, v_token, v_channel,
        bits, TURN, ROOM, BN, BH, BV,
    )  # fmt: skip
    e = tl.arange(0, BV)
    for start in range(0, w, BW):
        column = start + tl.arange(0, BW)
        inside = (e < d_v)[:, None] & (column < ld_out)[None, :]
        at = out + (h * wide_v + e)[:, None] * ld_out + column[None, :]
        tile = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        part = tl.sum(mixed[:, None] * tile, axis=0)
        tl.store(parts + (h * N + b) * ld_out + column, part, mask=column < w)
    _finish(x, parts, targets, counters + b, b, heads, N, w, ld_out, x_token, x_site, b + 1, BP, BR)


def _summing(many: int, columns: int) -> dict[str, int]:
    """Blocks of the last program: all parts at once, and as many columns as registers hold."""
    rows = triton.next_power_of_2(many)
    most = max(16, 16384 // rows)
    return {"BP": rows, "BR": min(most, max(16, triton.next_power_of_2(columns)))}


def mlp_(
    x: Tensor,
    read: tuple[Tensor, Tensor, Tensor],
    write: tuple[Tensor, Tensor],
    counters: Tensor,
    eps: float,
    filters: int = 64,
) -> Tensor:
    """x plus the outputs of an MLP, in place: x [N, D].

    `read` is (sites [d], weight [d], maps [d, 2 f]), `write` (maps [f, >= w], sites [w]).
    `counters` are zero, one for every 16 tokens, and stay zero. `filters` is the number of filters
    of a program.
    """
    (sites, weight, maps), (down, targets) = read, write
    tokens, f, w = len(x), maps.shape[1] // 2, len(targets)
    if not tokens or not f or not w:
        return x
    chunks = triton.cdiv(f, filters)
    check_offsets(chunks * down.shape[1], tokens)
    parts = torch.empty(chunks, tokens, down.shape[1], dtype=torch.float32, device=x.device)
    _mlp[(triton.cdiv(tokens, BLOCK) * chunks,)](
        x, sites, weight, maps, down, targets, parts, counters, tokens, len(sites), f, w,
        down.shape[1], *x.stride(), eps, EPS, chunks, BM=BLOCK, BF=filters, BK=128, BW=64,
        **_summing(chunks, w), num_warps=8, num_stages=3,
    )  # fmt: skip
    return x


def attention_(
    x: Tensor,
    read: tuple[Tensor, Tensor, Tensor],
    write: tuple[Tensor, Tensor],
    counters: Tensor,
    eps: float,
    cache: tuple[Tensor, Tensor],
    positions: Tensor,
    heads: int,
    padded: tuple[int, int],
    second: int,
    angles: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """x plus the outputs of attention of one token of every sequence, in place: x [B, D].

    `read`, `write` as for `mlp_`, with one counter for every sequence; the rest as in
    `decoding.attend_one`.
    """
    (sites, weight, maps), (out, targets), (keys, values) = read, write, cache
    tokens, w = len(x), len(targets)
    check_offsets(heads * out.shape[1], tokens)
    parts = torch.empty(heads, tokens, out.shape[1], dtype=torch.float32, device=x.device)
    numbers, launch = attention_launch(keys, values, heads, padded[1], angles is not None)
    half, rest, d_v, *strides = numbers
    cos, sin = angles or (x, x)
    _attention[(tokens * heads,)](
        x, sites, weight, maps, out, targets, parts, counters, keys, values, cos, sin, positions,
        tokens, len(sites), w, maps.shape[1], out.shape[1], *x.stride(), eps, EPS, heads,
        keys.shape[1], half, rest, d_v, *padded, second if angles else half, *strides,
        1 / math.log(2), TURN=angles is not None, BK=64, BW=64, **_summing(heads, w), **launch,
    )  # fmt: skip
    return x
