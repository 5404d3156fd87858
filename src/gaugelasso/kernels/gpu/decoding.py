"""Kernels of decoding: attention of one token over the cache, and the noise of draws.

Nothing here has a gradient. References: `inference.operators.Attention.mix_one` without kernels,
and `inference.noise`.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.gpu.group_attention import UNSEEN, attend_groups_, head_strides
from gaugelasso.kernels.tiles import Tile


@triton.jit
def _turned(one, two, cos, sin, at, mask):
    """Both halves of a head, rotated by the angles at this place of the tables."""
    c = tl.load(cos + at, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=mask, other=0.0).to(tl.float32)
    return one * c - two * s, one * s + two * c


@triton.jit
def over_cache(q_one, q_two, k_one, k_two, value, keys, values, cos, sin, count, stores, half, rest,
               d_v, second, k_token, k_channel, v_token, v_channel, bits, TURN: tl.constexpr,
               ROOM: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr,
               BV: tl.constexpr):  # fmt: skip
    """One head of a new token, over `count` keys before it and its own: [BV] in float32.

    Queries and keys are the two parts of a head before rotation, in float32; `keys` and `values`
    point to the head's cache. Where it `stores`, the new key and value go there. BN sums run side
    by side, each over every BN-th key. Blocks are [channels, keys]: the keys of a channel are
    contiguous.
    """
    p, e = tl.arange(0, BH), tl.arange(0, BV)
    early, late, known = p < half, p < rest, e < d_v
    if TURN:
        q_one, q_two = _turned(q_one, q_two, cos, sin, count * second + p, early)
        k_one, k_two = _turned(k_one, k_two, cos, sin, count * second + p, early)
    new_one, new_two = k_one.to(keys.dtype.element_ty), k_two.to(keys.dtype.element_ty)
    value = value.to(values.dtype.element_ty)
    if stores:
        to = keys + count * k_token + p * k_channel
        tl.store(to, new_one, mask=early)
        tl.store(to + half * k_channel, new_two, mask=late)
        tl.store(values + count * v_token + e * v_channel, value, mask=known)
    q_one, q_two = q_one * bits, q_two * bits
    own = tl.sum(q_one * new_one.to(tl.float32) + q_two * new_two.to(tl.float32), axis=0)
    place = tl.arange(0, BN)
    limit = tl.cdiv(count, 16) * 16
    top = tl.where(place == 0, own, UNSEEN)
    total = tl.where(place == 0, 1.0, 0.0)
    mixed = tl.where((place == 0)[None, :], value.to(tl.float32)[:, None], 0.0)
    for first in range(0, count, BN):
        key = first + place
        seen = key < count
        at = keys + p[:, None] * k_channel + key[None, :] * k_token
        # Whole vectors are read where there is room: what is not seen has no weight.
        near = key < limit if ROOM else seen
        one = tl.load(at, mask=early[:, None] & near[None, :], other=0.0)
        two = tl.load(at + half * k_channel, mask=late[:, None] & near[None, :], other=0.0)
        at = values + e[:, None] * v_channel + key[None, :] * v_token
        v = tl.load(at, mask=known[:, None] & near[None, :], other=0.0)
        one = tl.where(seen[None, :], one, 0.0).to(tl.float32)
        two = tl.where(seen[None, :], two, 0.0).to(tl.float32)
        v = tl.where(seen[None, :], v, 0.0).to(tl.float32)
        scores = tl.sum(one * q_one[:, None] + two * q_two[:, None], axis=0)
        scores = tl.where(seen, scores, UNSEEN)
        higher = tl.maximum(top, scores)
        share = tl.where(seen, tl.exp2(scores - higher), 0.0)
        fade = tl.exp2(top - higher)
        total = total * fade + share
        mixed = mixed * fade[None, :] + share[None, :] * v
        top = higher
    fade = tl.exp2(top - tl.max(top, axis=0))
    return tl.sum(mixed * fade[None, :], axis=1) / tl.sum(total * fade, axis=0)


@triton.jit
def _attend_one(rows, keys, values, cos, sin, positions, out, heads, groups, half, rest, d_v,
                wide_k, wide_v, second, ld, k_head, k_token, k_channel, v_head, v_token, v_channel,
                bits, TURN: tl.constexpr, ROOM: tl.constexpr, BN: tl.constexpr,
                BH: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One head of one sequence.

    A head's channels are `half` and `rest`, which lie `second` channels apart in a row, and
    together in the cache.
    """
    lane = tl.program_id(0)
    b, h = lane // heads, lane % heads
    share = heads // groups
    g = h // share
    count = tl.load(positions + b).to(tl.int32)
    p, e = tl.arange(0, BH), tl.arange(0, BV)
    early, late = p < half, p < rest
    source = rows + b * ld
    q_at, k_at = source + h * wide_k + p, source + (heads + g) * wide_k + p
    q_one = tl.load(q_at, mask=early, other=0.0).to(tl.float32)
    q_two = tl.load(q_at + second, mask=late, other=0.0).to(tl.float32)
    k_one = tl.load(k_at, mask=early, other=0.0).to(tl.float32)
    k_two = tl.load(k_at + second, mask=late, other=0.0).to(tl.float32)
    v_at = source + (heads + groups) * wide_k + g * wide_v + e
    value = tl.load(v_at, mask=e < d_v, other=0.0).to(tl.float32)
    head = b.to(tl.int64) * groups + g
    result = over_cache(
        q_one, q_two, k_one, k_two, value, keys + head * k_head, values + head * v_head, cos, sin,
        count, h % share == 0, half, rest, d_v, second, k_token, k_channel, v_token, v_channel,
        bits, TURN, ROOM, BN, BH, BV,
    )  # fmt: skip
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


def attend_one(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    heads: int,
    padded: tuple[int, int],
    second: int,
    angles: tuple[Tensor, Tensor] | None,
    tile: Tile | None = None,
) -> Tensor:
    """softmax(q k^T) v of one token of every sequence, which is stored in the cache: [B, H wide_v].

    rows [B, features] have queries, keys and values as in `mixing`. keys [B, G, L, d_k] and values
    [B, G, L, d_v] are the cache. The token stands at its position [B], after the keys that it
    sees; what lies beyond has no effect. A cache whose channels are contiguous and have room for a
    multiple of 16 keys is read fastest. With a `tile`, tensor cores multiply.
    """
    assert rows.is_contiguous()
    batch, wide_v = len(rows), padded[1]
    out = rows.new_empty(batch, heads * wide_v)
    if tile is not None:
        return attend_groups_(
            rows, keys, values, positions, heads, padded, second, angles, tile, out
        )
    numbers, launch = attention_launch(keys, values, heads, wide_v, angles is not None)
    half, rest, d_v, *strides = numbers
    cos, sin = angles or (rows, rows)
    _attend_one[(batch * heads,)](
        rows, keys, values, cos, sin, positions, out, heads, keys.shape[1], half, rest, d_v,
        *padded, second if angles else half, rows.shape[1], *strides, 1 / math.log(2),
        TURN=angles is not None, **launch,
    )  # fmt: skip
    return out


def attention_launch(
    keys: Tensor, values: Tensor, heads: int, wide_v: int, turned: bool
) -> tuple[tuple[int, ...], dict[str, int | bool]]:
    """Sizes and strides of a cache, and the blocks of the kernels that read it."""
    batch, _, length, d_k = keys.shape
    power = triton.next_power_of_2
    half = d_k // 2 if turned else (d_k + 1) // 2
    strides = (*head_strides(keys), *head_strides(values))
    deep, wide = power(half), power(wide_v)
    # Few programs have more keys each, and more threads for them.
    few = batch * heads < 128
    most = (256 * 128 if few else 128 * 96) // (2 * deep + 2 * wide)
    block = min(512, power(length), 1 << max(4, most.bit_length() - 1))
    room = strides[1] == strides[4] == 1 and length % 16 == 0
    launch = {"ROOM": room, "BN": block, "BH": deep, "BV": wide, "num_warps": 8 if few else 4}
    return (half, d_k - half, values.shape[3], *strides), launch


def exponential_(noise: Tensor, seeds: Tensor, counts: Tensor) -> None:
    """Fill noise [B, V] with the draws of `inference.noise.exponential_`."""
    batch, size = noise.shape
    block = 256
    _exponential[(batch, triton.cdiv(size, block))](seeds, counts, noise, size, BV=block)
