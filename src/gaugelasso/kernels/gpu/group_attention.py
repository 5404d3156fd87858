"""Attention of one token over the cache, for the heads that share their keys, by tensor cores.

The reference is that of `decoding`, and so are the arguments.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.gpu.products import _dot
from gaugelasso.kernels.tiles import Tile

# A score that no query gives: finite, so that the difference of two of them is a number.
UNSEEN = tl.constexpr(-1e30)


@triton.jit
def _keys(mixed, total, top, queries, keys, values, start, end, d_k, d_v, k_token, k_channel,
          v_token, v_channel, bits, EDGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
          BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """Adds the values of the keys from start to end to the weighted sums so far.

    Without EDGE, all keys of a block exist.
    """
    p, e = tl.arange(0, BK), tl.arange(0, BV)
    for first in range(start, end, BN):
        key = first + tl.arange(0, BN)
        seen = key < end
        real, known = (p < d_k)[:, None], (e < d_v)[:, None]
        if EDGE:
            real, known = real & seen[None, :], known & seen[None, :]
        at = keys + p[:, None] * k_channel + key[None, :] * k_token
        block = tl.load(at, mask=real, other=0.0)
        at = values + e[:, None] * v_channel + key[None, :] * v_token
        content = tl.load(at, mask=known, other=0.0)
        scores = _dot(queries, block, tl.zeros((BM, BN), tl.float32)) * bits
        if EDGE:
            scores = tl.where(seen[None, :], scores, UNSEEN)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, axis=1)
        mixed = _dot(weights.to(content.dtype), tl.trans(content), mixed * fade[:, None])
        top = higher
    return mixed, total, top


@triton.jit
def _turned_heads(x, cos, sin, channel, count, half, second, real, TURN: tl.constexpr):
    """Channels of the heads at x, rotated by the angles of position `count`, in float32.

    With TURN the halves of a head lie `second` channels apart.
    """
    early = channel < half
    if TURN:
        x += tl.where(early, channel, channel - half + second)
    else:
        x += channel
    here = tl.load(x, mask=real, other=0.0).to(tl.float32)
    if TURN:
        there = tl.load(x + tl.where(early, second, -second), mask=real, other=0.0).to(tl.float32)
        at = count * second + tl.where(early, channel, channel - half)
        c = tl.load(cos + at, mask=real, other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=real, other=0.0).to(tl.float32)
        here = here * c + there * tl.where(early, -s, s)
    return here


@triton.jit
def _attend_group(rows, keys, values, cos, sin, positions, out, heads, groups, d_k, d_v, wide_k,
                  wide_v, second, ld, k_head, k_token, k_channel, v_head, v_token, v_channel, bits,
                  TURN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                  BV: tl.constexpr):  # fmt: skip
    """Up to BM heads of one sequence that share their keys; the last rows may be empty.

    As `_attend_one`, by tensor cores: their operands are loaded while others are multiplied.
    """
    share = heads // groups
    b, g = tl.program_id(0) // groups, tl.program_id(0) % groups
    count = tl.load(positions + b).to(tl.int32)
    m, p, e = tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    half, live, known = d_k // 2, m < share, e < d_v
    source = rows + b * ld
    column = p[None, :] + tl.zeros((BM, 1), tl.int32)
    at = source + (g * share + m)[:, None] * wide_k + tl.zeros((1, BK), tl.int32)
    inside = live[:, None] & (column < d_k)
    queries = _turned_heads(at, cos, sin, column, count, half, second, inside, TURN)
    at = source + (heads + g) * wide_k
    new = _turned_heads(at, cos, sin, p, count, half, second, p < d_k, TURN)
    new = new.to(keys.dtype.element_ty)
    value = tl.load(source + (heads + groups) * wide_k + g * wide_v + e, mask=known, other=0.0)
    head = b.to(tl.int64) * groups + g
    keys, values = keys + head * k_head, values + head * v_head
    tl.store(keys + count * k_token + p * k_channel, new, mask=p < d_k)
    tl.store(values + count * v_token + e * v_channel, value, mask=known)
    queries = queries.to(keys.dtype.element_ty)
    own = queries.to(tl.float32) * new.to(tl.float32)[None, :]
    top = tl.sum(own, axis=1) * bits
    total = tl.full((BM,), 1.0, tl.float32)
    mixed = tl.zeros((BM, BV), tl.float32) + value.to(tl.float32)[None, :]
    whole = count // BN * BN
    mixed, total, top = _keys(
        mixed, total, top, queries, keys, values, 0, whole, d_k, d_v, k_token, k_channel, v_token,
        v_channel, bits, False, BM, BN, BK, BV,
    )  # fmt: skip
    mixed, total, top = _keys(
        mixed, total, top, queries, keys, values, whole, count, d_k, d_v, k_token, k_channel,
        v_token, v_channel, bits, True, BM, BN, BK, BV,
    )  # fmt: skip
    at = out + b * heads * wide_v + (g * share + m)[:, None] * wide_v + e[None, :]
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(at, mixed, mask=live[:, None] & (e < wide_v)[None, :])


def attend_groups_(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    heads: int,
    padded: tuple[int, int],
    second: int,
    angles: tuple[Tensor, Tensor] | None,
    tile: Tile,
    out: Tensor,
) -> Tensor:
    """Fill out [B, H wide_v]; arguments as in `decoding.attend_one`."""
    (batch, groups, _, d_k), d_v = keys.shape, values.shape[3]
    cos, sin = angles or (rows, rows)
    power = triton.next_power_of_2
    _attend_group[(batch * groups,)](
        rows, keys, values, cos, sin, positions, out, heads, groups, d_k, d_v, *padded,
        second, rows.shape[1], *head_strides(keys), *head_strides(values), 1 / math.log(2),
        TURN=angles is not None, BM=max(tile.tokens, power(heads // groups)), BN=tile.columns,
        BK=max(16, power(d_k)), BV=max(16, power(padded[1])), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return out


def head_strides(cache: Tensor) -> tuple[int, int, int]:
    """Of heads, tokens and channels of [B, G, L, d], whose heads follow each other."""
    sequences, heads, tokens, channels = cache.stride()
    assert sequences == cache.shape[1] * heads
    return heads, tokens, channels
