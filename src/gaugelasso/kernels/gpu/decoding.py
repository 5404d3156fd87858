"""Kernels between the products of attention at inference: heads, the cache, one-token attention.

Nothing here has a gradient. References: `inference.operators.Attention.project` with
`inference.cache.Cache`, `inference.attention.attend` with a mask, and `inference.noise`.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.dispatch import check_offsets

# A score that no query gives: finite, so that the difference of two of them is a number.
UNSEEN = tl.constexpr(-1e30)


@triton.jit
def _split(rows, q, k, v, keys, values, cos, sin, at, slots, N, S, L, heads, groups, d_k, d_v,
           wide_k, wide_v, ld, TURN: tl.constexpr, PLACED: tl.constexpr, STORE: tl.constexpr,
           CHOSEN: tl.constexpr, OUT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
           BV: tl.constexpr):  # fmt: skip
    """One head of a block of tokens: rotated, and copied to its tensor and to the cache."""
    n = tl.program_id(0) * BT + tl.arange(0, BT)
    lane = tl.program_id(1)
    live = n < N
    slot, t = n // S, n % S
    if PLACED:
        t = tl.load(at + n, mask=live, other=0).to(tl.int32)
    if CHOSEN:
        slot = tl.load(slots + slot, mask=live, other=0).to(tl.int32)
    if lane < heads + groups:
        p = tl.arange(0, BK)
        real = live[:, None] & (p < d_k)[None, :]
        source = rows + n[:, None] * ld + lane * wide_k
        value = tl.load(source + p[None, :], mask=real, other=0.0)
        if TURN:
            half = d_k // 2
            early = p < half
            partner = tl.where(early, p + half, p - half)
            pair = tl.where(early, p, partner)
            other = tl.load(source + partner[None, :], mask=real, other=0.0).to(tl.float32)
            angle = t[:, None] * half + pair[None, :]
            c = tl.load(cos + angle, mask=real, other=0.0).to(tl.float32)
            s = tl.load(sin + angle, mask=real, other=0.0).to(tl.float32)
            s = tl.where(early[None, :], -s, s)
            value = (value.to(tl.float32) * c + other * s).to(q.dtype.element_ty)
        full = live[:, None] & (p < wide_k)[None, :]
        if lane < heads:
            to = q + (n * heads + lane)[:, None] * wide_k + p[None, :]
            tl.store(to, value, mask=full)
        else:
            g = lane - heads
            if OUT:
                to = k + (n * groups + g)[:, None] * wide_k + p[None, :]
                tl.store(to, value, mask=full)
            if STORE:
                row = (slot.to(tl.int64) * groups + g) * L + t
                tl.store(keys + row[:, None] * d_k + p[None, :], value, mask=real)
    else:
        g = lane - heads - groups
        e = tl.arange(0, BV)
        known = live[:, None] & (e < d_v)[None, :]
        start = (heads + groups) * wide_k + g * wide_v
        kept = tl.load(rows + n[:, None] * ld + start + e[None, :], mask=known, other=0.0)
        if OUT:
            place = v + (n * groups + g)[:, None] * wide_v + e[None, :]
            tl.store(place, kept, mask=live[:, None] & (e < wide_v)[None, :])
        if STORE:
            line = (slot.to(tl.int64) * groups + g) * L + t
            tl.store(values + line[:, None] * d_v + e[None, :], kept, mask=known)


@triton.jit
def _attend_one(q, keys, values, positions, out, L, heads, groups, d_k, d_v, wide_k, wide_v, bits,
                BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One head of one sequence. BN sums run side by side, each over every BN-th key."""
    lane = tl.program_id(0)
    b, h = lane // heads, lane % heads
    row = (b.to(tl.int64) * groups + h // (heads // groups)) * L
    # The keys that this token sees, its own included.
    count = tl.load(positions + b).to(tl.int32) + 1
    p, e = tl.arange(0, BK), tl.arange(0, BV)
    query = tl.load(q + lane * wide_k + p, mask=p < d_k, other=0.0).to(tl.float32) * bits
    top = tl.full((BN,), UNSEEN, tl.float32)
    total = tl.zeros((BN,), tl.float32)
    mixed = tl.zeros((BN, BV), tl.float32)
    for first in range(0, count, BN):
        key = first + tl.arange(0, BN)
        seen = key < count
        at = keys + (row + key)[:, None] * d_k + p[None, :]
        k = tl.load(at, mask=seen[:, None] & (p < d_k)[None, :], other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(k * query[None, :], axis=1), UNSEEN)
        higher = tl.maximum(top, scores)
        share = tl.where(seen, tl.exp2(scores - higher), 0.0)
        fade = tl.exp2(top - higher)
        at = values + (row + key)[:, None] * d_v + e[None, :]
        v = tl.load(at, mask=seen[:, None] & (e < d_v)[None, :], other=0.0).to(tl.float32)
        total = total * fade + share
        mixed = mixed * fade[:, None] + share[:, None] * v
        top = higher
    fade = tl.exp2(top - tl.max(top, axis=0))
    result = tl.sum(mixed * fade[:, None], axis=0) / tl.sum(total * fade, axis=0)
    tl.store(out + lane * wide_v + e, result.to(out.dtype.element_ty), mask=e < wide_v)


@triton.jit
def _mix(z):
    """The last step of SplitMix64: every bit of the result depends on every bit of z."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _exponential(seeds, counts, out, V, BV: tl.constexpr):
    b = tl.program_id(0)
    j = tl.program_id(1) * BV + tl.arange(0, BV)
    seed = tl.load(seeds + b).to(tl.uint64)
    count = tl.load(counts + b).to(tl.uint64)
    draw = _mix(_mix(seed) + count * 0x9E3779B97F4A7C15)
    z = _mix(draw + (j + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    # With 23 bits a float32 holds the sum exactly, so that no uniform draw is 0 or 1.
    uniform = ((z >> 41).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    # At least its least value: a fast logarithm may give 0, by which nothing can be divided.
    drawn = tl.maximum(-tl.log(uniform), 5.9604644775390625e-08)
    tl.store(out + b * V + j, drawn, mask=j < V)


def split_heads(
    rows: Tensor,
    batch: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    padded: tuple[int, int],
    angles: tuple[Tensor, Tensor] | None,
    at: Tensor | None = None,
    cache: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
    cached_only: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, S, wide_k], k [B, G, S, wide_k], v [B, G, S, wide_v] of rows [N, features].

    `heads` is (H, G), `widths` (d_k, d_v), `padded` (wide_k, wide_v). Features come as H queries, G
    keys and G values, each padded. `angles` are cos and sin of RoPE, [length, d_k / 2]; `at` [B, S]
    are the positions, else they count from 0. Keys [.., G, L, d_k] and values of a `cache` receive
    the new ones at their positions, in the sequences `slots` [B] (default: in order). With
    `cached_only`, k and v are not written elsewhere, and what is returned for them has no meaning.
    """
    rows = rows.contiguous()
    tokens, (h, g), (wide_k, wide_v) = rows.shape[0], heads, padded
    size = tokens // batch
    check_offsets(rows.shape[1], tokens)
    q = rows.new_empty(batch, size, h, wide_k)
    k = q if cached_only else rows.new_empty(batch, size, g, wide_k)
    v = q if cached_only else rows.new_empty(batch, size, g, wide_v)
    keys, values = cache or (q, q)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    cos, sin = angles or (q, q)
    power = triton.next_power_of_2
    block = 64 if tokens >= 4096 else 16
    _split[(triton.cdiv(tokens, block), h + 2 * g)](
        rows, q, k, v, keys, values, cos, sin, q if at is None else at.contiguous(),
        q if slots is None else slots, tokens, size, keys.shape[2] if cache else 1, h, g, *widths,
        wide_k, wide_v, rows.shape[1], TURN=angles is not None, PLACED=at is not None,
        STORE=cache is not None, CHOSEN=slots is not None, OUT=not cached_only, BT=block,
        BK=power(wide_k), BV=power(wide_v),
    )  # fmt: skip
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def attend_one(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, wide_v: int) -> Tensor:
    """softmax(q k^T) v of one token of every sequence, which sees the keys up to its position.

    q [B, H, 1, wide_k] of `split_heads`, keys [B, G, L, d_k], values [B, G, L, d_v],
    positions [B] -> [B, H, 1, wide_v]. Keys beyond the position are not read.
    """
    batch, heads = q.shape[:2]
    q = q.transpose(1, 2).contiguous()
    groups, length, d_k = keys.shape[1:]
    out = q.new_empty(batch, 1, heads, wide_v)
    d_v, power = values.shape[3], triton.next_power_of_2
    wide = max(power(d_k), power(wide_v))
    block = 128 if wide <= 32 else 64 if wide <= 64 else 32
    _attend_one[(batch * heads,)](
        q, keys, values, positions, out, length, heads, groups, d_k, d_v, q.shape[3], wide_v,
        1 / math.log(2), BN=block, BK=power(d_k), BV=power(wide_v),
    )  # fmt: skip
    return out.transpose(1, 2)


def exponential_(noise: Tensor, seeds: Tensor, counts: Tensor) -> None:
    """Fill noise [B, V] with the draws of `inference.noise.exponential_`."""
    batch, size = noise.shape
    block = 256
    _exponential[(batch, triton.cdiv(size, block))](seeds, counts, noise, size, BV=block)
