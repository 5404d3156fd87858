"""Attention of whole sequences at inference, on the rows that one product has given.

A row [features] has H queries, G keys and G values, each as wide as its padding says. The two
halves of a rotated head lie `second` channels apart. Nothing is copied out of the rows. Nothing
here has a gradient. References: `inference.operators.Attention` with `inference.attention.attend`.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.dispatch import check_offsets
from gaugelasso.kernels.gpu.group_attention import head_strides
from gaugelasso.kernels.gpu.products import _dot
from gaugelasso.kernels.tiles import Tile

# In units of 8 channels, so that the compiler knows that they are multiples.
_EIGHTS = ["ld8", "wide8_k", "wide8_v", "second8", "heads", "groups", "S"]


@triton.jit
def _rotate(rows, keys, values, cos, sin, at, slots, N, S, heads, groups, half, d_v, wide_k, wide_v,
            second, ld, k_head, k_token, k_channel, v_head, v_token, v_channel, TURN: tl.constexpr,
            PLACED: tl.constexpr, STORE: tl.constexpr, CHOSEN: tl.constexpr, BT: tl.constexpr,
            BH: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One head of a block of tokens: rotated in place; keys and values also go to the cache.

    Without TURN nothing is rotated, and the keys are one piece of `half` channels.
    """
    n = tl.program_id(0) * BT + tl.arange(0, BT)
    lane = tl.program_id(1)
    if not TURN:  # queries stay as they are
        lane += heads
    live = n < N
    slot, t = n // S, n % S
    if PLACED:
        t = tl.load(at + n, mask=live, other=0).to(tl.int32)
    if CHOSEN:
        slot = tl.load(slots + slot, mask=live, other=0).to(tl.int32)
    if lane < heads + groups:
        p = tl.arange(0, BH)
        real = live[:, None] & (p < half)[None, :]
        source = rows + n[:, None] * ld + lane * wide_k + p[None, :]
        one = tl.load(source, mask=real, other=0.0)
        two = one
        if TURN:
            two = tl.load(source + second, mask=real, other=0.0)
            angle = t[:, None] * second + p[None, :]
            c = tl.load(cos + angle, mask=real, other=0.0).to(tl.float32)
            s = tl.load(sin + angle, mask=real, other=0.0).to(tl.float32)
            early, late = one.to(tl.float32), two.to(tl.float32)
            one = (early * c - late * s).to(rows.dtype.element_ty)
            two = (early * s + late * c).to(rows.dtype.element_ty)
            tl.store(source, one, mask=real)
            tl.store(source + second, two, mask=real)
        if STORE:  # noqa: SIM102 (one is known when the kernel is compiled)
            if lane >= heads:
                start = (slot.to(tl.int64) * groups + lane - heads) * k_head + t * k_token
                to = keys + start[:, None] + p[None, :] * k_channel
                tl.store(to, one, mask=real)
                if TURN:
                    tl.store(to + half * k_channel, two, mask=real)
    else:
        g = lane - heads - groups
        e = tl.arange(0, BV)
        known = live[:, None] & (e < d_v)[None, :]
        start = (heads + groups) * wide_k + g * wide_v
        value = tl.load(rows + n[:, None] * ld + start + e[None, :], mask=known, other=0.0)
        line = (slot.to(tl.int64) * groups + g) * v_head + t * v_token
        tl.store(values + line[:, None] + e[None, :] * v_channel, value, mask=known)


@triton.jit
def _piece(x, row, column, S, width, ld, EVEN: tl.constexpr):
    """Rows of a sequence; zeros beyond the width and, unless no block passes it, after the end."""
    at = x + row[:, None] * ld + column[None, :]
    inside = (column < width)[None, :]
    if not EVEN:
        inside = inside & (row < S)[:, None]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _turned(x, cos, sin, row, column, S, second, ld, EVEN: tl.constexpr):
    """Both halves of a head, rotated by the angles of their positions."""
    one = _piece(x, row, column, S, second, ld, EVEN)
    two = _piece(x + second, row, column, S, second, ld, EVEN)
    c = _piece(cos, row, column, S, second, second, EVEN).to(tl.float32)
    s = _piece(sin, row, column, S, second, second, EVEN).to(tl.float32)
    early, late = one.to(tl.float32), two.to(tl.float32)
    return (early * c - late * s).to(one.dtype), (early * s + late * c).to(one.dtype)


@triton.jit
def _more(mixed, total, top, one, two, query, k, v, cos, sin, start, end, S, second, wide_k, wide_v,
          ld, bits, EDGE: tl.constexpr, TURN: tl.constexpr, CAUSAL: tl.constexpr,
          EVEN: tl.constexpr, SPARE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
          BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """Adds the values of the keys from start to end to the weighted sum so far.

    With SPARE the column after the values is one, so that the product also adds up the weights.
    """
    channel, e = tl.arange(0, BK), tl.arange(0, BV)
    for first in range(start, end, BN):
        key = first + tl.arange(0, BN)
        scores = tl.zeros((BM, BN), tl.float32)
        if TURN:
            early, late = _turned(k, cos, sin, key, channel, S, second, ld, EVEN)
            scores = _dot(one, tl.trans(early), scores)
            scores = _dot(two, tl.trans(late), scores)
        else:
            keys = _piece(k, key, channel, S, wide_k, ld, EVEN)
            scores = _dot(one, tl.trans(keys), scores)
        values = _piece(v, key, e, S, wide_v, ld, EVEN)
        if SPARE:
            values = tl.where((e == wide_v)[None, :], 1.0, values)
        if EDGE:
            # From the first key on: a comparison with a constant is one instruction instead of two.
            if CAUSAL:
                seen = tl.arange(0, BN)[None, :] <= (query - first)[:, None]
            else:
                seen = (key < S)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        # Never -inf: the first block contains the first key, which every query sees.
        higher = tl.maximum(top, tl.max(scores, axis=1) * bits)
        weights = tl.exp2(scores * bits - higher[:, None])
        fade = tl.exp2(top - higher)
        if not SPARE:
            total = total * fade + tl.sum(weights, axis=1)
        mixed = _dot(weights.to(values.dtype), values, mixed * fade[:, None])
        top = higher
    return mixed, total, top


@triton.jit(do_not_specialize=_EIGHTS)
def _attend_rows(rows, cos, sin, out, S, heads, groups, second8, wide8_k, wide8_v, ld8, bits,
                 TURN: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, SPARE: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr):  # fmt: skip
    """One block of queries of one head. Heads of one sequence are neighbours.

    EVEN says that S is a multiple of BM and of BN, SPARE that BV is more than the values' width.
    """
    second, wide_k, wide_v, ld = second8 * 8, wide8_k * 8, wide8_v * 8, ld8 * 8
    blocks = tl.cdiv(S, BM)
    h = tl.program_id(0) % heads
    # The last blocks have the most keys and start first.
    start = (blocks - 1 - tl.program_id(0) // heads % blocks) * BM
    b = tl.program_id(0) // heads // blocks
    g = h // (heads // groups)
    rows += b * S * ld
    q, k = rows + h * wide_k, rows + (heads + g) * wide_k
    v = rows + (heads + groups) * wide_k + g * wide_v
    query = start + tl.arange(0, BM)
    channel, e = tl.arange(0, BK), tl.arange(0, BV)
    if TURN:
        one, two = _turned(q, cos, sin, query, channel, S, second, ld, EVEN)
    else:
        one = _piece(q, query, channel, S, wide_k, ld, EVEN)
        two = one
    mixed = tl.zeros((BM, BV), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    end = tl.minimum(start + BM, S) if CAUSAL else S
    edge = (start if CAUSAL else S) // BN * BN
    mixed, total, top = _more(
        mixed, total, top, one, two, query, k, v, cos, sin, 0, edge, S, second, wide_k, wide_v, ld,
        bits, False, TURN, CAUSAL, EVEN, SPARE, BM, BN, BK, BV,
    )  # fmt: skip
    mixed, total, top = _more(
        mixed, total, top, one, two, query, k, v, cos, sin, edge, end, S, second, wide_k, wide_v,
        ld, bits, True, TURN, CAUSAL, EVEN, SPARE, BM, BN, BK, BV,
    )  # fmt: skip
    if SPARE:
        total = tl.sum(tl.where((e == wide_v)[None, :], mixed, 0.0), axis=1)
    mixed = mixed / total[:, None]
    width = heads * wide_v
    at = out + (b * S + query)[:, None] * width + h * wide_v + e[None, :]
    inside = (query < S)[:, None] & (e < wide_v)[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty), mask=inside)


def rotate_heads_(
    rows: Tensor,
    batch: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    padded: tuple[int, int],
    second: int,
    angles: tuple[Tensor, Tensor] | None,
    at: Tensor | None = None,
    cache: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys of rows [N, features] in place, and return the rows.

    `heads` is (H, G), `widths` (d_k, d_v), `padded` (wide_k, wide_v). `angles` are cos and sin of
    RoPE, [length, second]; `at` [B, S] are the positions, else they count from 0. Keys
    [.., G, L, d_k] and values of a `cache` receive the new ones at their positions, in the
    sequences `slots` [B] (default: in order), without padding.
    """
    if angles is None and cache is None:
        return rows
    assert rows.is_contiguous()
    tokens, (h, g), (d_k, d_v) = rows.shape[0], heads, widths
    check_offsets(rows.shape[1], tokens)
    keys, values = cache or (rows, rows)
    strides = (*head_strides(keys), *head_strides(values)) if cache else (0,) * 6
    cos, sin = angles or (rows, rows)
    half = d_k // 2 if angles else d_k
    power = triton.next_power_of_2
    block = 64 if tokens >= 4096 else 16
    lanes = (h if angles else 0) + g + (g if cache else 0)
    _rotate[(triton.cdiv(tokens, block), lanes)](
        rows, keys, values, cos, sin, rows if at is None else at.contiguous(),
        rows if slots is None else slots, tokens, tokens // batch, h, g, half, d_v, *padded,
        second, rows.shape[1], *strides, TURN=angles is not None,
        PLACED=at is not None, STORE=cache is not None, CHOSEN=slots is not None, BT=block,
        BH=power(half), BV=power(d_v),
    )  # fmt: skip
    return rows


def attend_rows(
    rows: Tensor,
    batch: int,
    heads: tuple[int, int],
    padded: tuple[int, int],
    angles: tuple[Tensor, Tensor] | None,
    causal: bool,
    tile: Tile | None = None,
) -> Tensor:
    """softmax(q k^T) v of rows [N, features], for every head: [N, H wide_v].

    Arguments as in `rotate_heads_`; all widths are multiples of 8. With `angles`, queries and
    keys are rotated as they are read, and the halves of a head are wide_k / 2 channels apart.
    """
    tokens, (h, g), (wide_k, wide_v) = rows.shape[0], heads, padded
    assert rows.is_contiguous()
    assert rows.shape[1] % 8 == wide_k % (16 if angles else 8) == wide_v % 8 == 0
    check_offsets(max(rows.shape[1], h * wide_v), tokens)
    out = rows.new_empty(tokens, h * wide_v)
    cos, sin = angles or (rows, rows)
    size = tokens // batch
    # Wide heads in two stages need more shared memory than some devices have.
    tile = tile or Tile(64, 64, 0, 4, 2 if max(padded) * rows.element_size() <= 128 else 1)
    second = wide_k // 2
    power = triton.next_power_of_2
    even = size % tile.tokens == size % tile.columns == 0
    wide = max(16, power(wide_v))
    _attend_rows[(triton.cdiv(size, tile.tokens) * batch * h,)](
        rows, cos, sin, out, size, h, g, second // 8, wide_k // 8, wide_v // 8, rows.shape[1] // 8,
        1 / math.log(2), TURN=angles is not None, CAUSAL=causal, EVEN=even, SPARE=wide > wide_v,
        BM=tile.tokens, BN=tile.columns, BK=max(16, power(second if angles else wide_k)), BV=wide,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
