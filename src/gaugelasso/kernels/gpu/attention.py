"""Attention of narrow heads: scores, softmax and weighted sum in one pass, and their gradients.

Head widths are rounded up to powers of two, at least 16. Tensors are token-major,
[B, S, heads, wide]. Scores are exponents of two (`bits` = scale / ln 2). Of each query's softmax
only the log-sum-exp is stored. No gradient is summed by atomics, so results are deterministic.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gaugelasso.kernels.dispatch import ALIGN

_SIZES = ["S", "heads", "groups", "eights_k", "eights_v"]

# Queries and keys of a tile: the fastest measured for causal heads of up to 32 channels.
FORWARD = D_QUERIES = (64, 64)
D_KEYS = (32, 64)
LAUNCH = {"num_warps": 4, "num_stages": 2}


@triton.jit
def _head(x, b, h, S, count, wide):
    """Pointer to head h of sequence b."""
    return x + (b * S * count + h) * wide


@triton.jit
def _rows(x, row, column, S, count, wide):
    """Rows of the head at x; zeros beyond the sequence and beyond the head's width."""
    at = x + row[:, None] * (count * wide) + column[None, :]
    return tl.load(at, mask=(row < S)[:, None] & (column < wide)[None, :], other=0.0)


@triton.jit
def _put(x, rows, row, column, S, count, wide):
    at = x + row[:, None] * (count * wide) + column[None, :]
    mask = (row < S)[:, None] & (column < wide)[None, :]
    tl.store(at, rows.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _dot(a, b):
    # Tensor cores use 11 bits of a float32. tf32x3 multiplies high and low parts separately.
    return tl.dot(a, b, input_precision="tf32x3" if a.dtype == tl.float32 else None)


@triton.jit
def _masked(scores, query, key, S, CAUSAL: tl.constexpr):
    """Scores with -inf for keys after the query (causal) or after the end of the sequence.

    Query and key have the layout of the scores. For a query within the sequence, the causal
    mask includes the end of the sequence.
    """
    return tl.where(key <= query if CAUSAL else key < S, scores, float("-inf"))


@triton.jit
def _query_block(S, heads, groups, BM: tl.constexpr):
    """This program's block of queries: lane, first query, sequence, head and group."""
    blocks = tl.cdiv(S, BM)
    lane = tl.program_id(0) // blocks
    # The last blocks have the most keys and start first.
    start = (blocks - 1 - tl.program_id(0) % blocks) * BM
    h = lane % heads
    return lane, start, lane // heads, h, h // (heads // groups)


@triton.jit
def _key_range(start, S, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """First key of the blocks that need a mask, and end of the keys that the queries see."""
    end = tl.minimum(start + BM, S) if CAUSAL else S
    return (start if CAUSAL else S) // BN * BN, end


@triton.jit
def _gather(mixed, total, top, queries, query, k, v, start, end, S, groups, wide_k, wide_v, bits,
            EDGE: tl.constexpr, CAUSAL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
            BN: tl.constexpr):  # fmt: skip
    """Adds the values of the keys from start to end to the weighted sum so far."""
    for first in range(start, end, BN):
        key = first + tl.arange(0, BN)
        keys = _rows(k, key, tl.arange(0, BK), S, groups, wide_k)
        values = _rows(v, key, tl.arange(0, BV), S, groups, wide_v)
        scores = _dot(queries, tl.trans(keys))
        if EDGE:
            scores = _masked(scores, query[:, None], key[None, :], S, CAUSAL)
        # Never -inf: the first block contains the first key, which every query sees.
        higher = tl.maximum(top, tl.max(scores, axis=1) * bits)
        weights = tl.exp2(scores * bits - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, axis=1)
        mixed = mixed * fade[:, None] + _dot(weights.to(values.dtype), values)
        top = higher
    return mixed, total, top


@triton.jit(do_not_specialize=_SIZES)
def _forward(q, k, v, out, lse, S, heads, groups, eights_k, eights_v, bits, CAUSAL: tl.constexpr,
             BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """One block of queries of one head."""
    lane, start, b, h, g = _query_block(S, heads, groups, BM)
    wide_k, wide_v = eights_k * 8, eights_v * 8
    k, v = _head(k, b, g, S, groups, wide_k), _head(v, b, g, S, groups, wide_v)
    query = start + tl.arange(0, BM)
    c_k, c_v = tl.arange(0, BK), tl.arange(0, BV)
    queries = _rows(_head(q, b, h, S, heads, wide_k), query, c_k, S, heads, wide_k)
    mixed = tl.zeros((BM, BV), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    edge, end = _key_range(start, S, CAUSAL, BM, BN)
    mixed, total, top = _gather(
        mixed, total, top, queries, query, k, v, 0, edge, S, groups, wide_k, wide_v, bits,
        False, CAUSAL, BK, BV, BN,
    )  # fmt: skip
    mixed, total, top = _gather(
        mixed, total, top, queries, query, k, v, edge, end, S, groups, wide_k, wide_v, bits,
        True, CAUSAL, BK, BV, BN,
    )  # fmt: skip
    mixed = mixed / total[:, None]
    _put(_head(out, b, h, S, heads, wide_v), mixed, query, c_v, S, heads, wide_v)
    tl.store(lse + lane * S + query, top + tl.log2(total), mask=query < S)


@triton.jit
def _add_to_queries(d_queries, queries, grads, log_sum, delta, query, k, v, start, end, S, groups,
                    wide_k, wide_v, bits, EDGE: tl.constexpr, CAUSAL: tl.constexpr,
                    BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Adds the terms of the keys from start to end to the gradient of a block of queries."""
    for first in range(start, end, BN):
        key = first + tl.arange(0, BN)
        keys = _rows(k, key, tl.arange(0, BK), S, groups, wide_k)
        values = _rows(v, key, tl.arange(0, BV), S, groups, wide_v)
        scores = _dot(queries, tl.trans(keys))
        if EDGE:
            scores = _masked(scores, query[:, None], key[None, :], S, CAUSAL)
        weights = tl.exp2(scores * bits - log_sum[:, None])
        d_scores = weights * (_dot(grads, tl.trans(values)) - delta[:, None])
        d_queries += _dot(d_scores.to(keys.dtype), keys)
    return d_queries


@triton.jit(do_not_specialize=_SIZES)
def _back_queries(q, k, v, out, d_out, lse, deltas, d_q, S, heads, groups, eights_k, eights_v,
                  bits, scale, CAUSAL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """d_q of one block of queries, and delta = sum_c out_c d_out_c, which `_back_keys` reads."""
    lane, start, b, h, g = _query_block(S, heads, groups, BM)
    wide_k, wide_v = eights_k * 8, eights_v * 8
    k, v = _head(k, b, g, S, groups, wide_k), _head(v, b, g, S, groups, wide_v)
    query = start + tl.arange(0, BM)
    c_k, c_v = tl.arange(0, BK), tl.arange(0, BV)
    queries = _rows(_head(q, b, h, S, heads, wide_k), query, c_k, S, heads, wide_k)
    grads = _rows(_head(d_out, b, h, S, heads, wide_v), query, c_v, S, heads, wide_v)
    mixed = _rows(_head(out, b, h, S, heads, wide_v), query, c_v, S, heads, wide_v)
    delta = tl.sum(mixed.to(tl.float32) * grads.to(tl.float32), axis=1)
    tl.store(deltas + lane * S + query, delta, mask=query < S)
    log_sum = tl.load(lse + lane * S + query, mask=query < S, other=float("inf"))
    d_queries = tl.zeros((BM, BK), tl.float32)
    edge, end = _key_range(start, S, CAUSAL, BM, BN)
    d_queries = _add_to_queries(
        d_queries, queries, grads, log_sum, delta, query, k, v, 0, edge, S, groups, wide_k,
        wide_v, bits, False, CAUSAL, BK, BV, BN,
    )  # fmt: skip
    d_queries = _add_to_queries(
        d_queries, queries, grads, log_sum, delta, query, k, v, edge, end, S, groups, wide_k,
        wide_v, bits, True, CAUSAL, BK, BV, BN,
    )  # fmt: skip
    _put(_head(d_q, b, h, S, heads, wide_k), scale * d_queries, query, c_k, S, heads, wide_k)


@triton.jit
def _add_to_keys(d_keys, d_values, keys, values, key, q, d_out, lse, deltas, b, g, start, end, S,
                 heads, groups, wide_k, wide_v, bits, EDGE: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Adds the terms of the queries from start to end to the gradients of keys and values."""
    c_k, c_v = tl.arange(0, BK), tl.arange(0, BV)
    share = heads // groups
    blocks = tl.cdiv(end - start, BM)
    # One loop over the blocks of all heads: two nested loops need too many registers.
    for i in range(0, share * blocks):
        h = g * share + i // blocks
        query = start + i % blocks * BM + tl.arange(0, BM)
        queries = _rows(_head(q, b, h, S, heads, wide_k), query, c_k, S, heads, wide_k)
        grads = _rows(_head(d_out, b, h, S, heads, wide_v), query, c_v, S, heads, wide_v)
        row = (b * heads + h) * S + query
        # A log-sum-exp of inf gives queries after the end of the sequence no weight.
        log_sum = tl.load(lse + row, mask=query < S, other=float("inf"))
        delta = tl.load(deltas + row, mask=query < S, other=0.0)
        # Keys by queries: the products below use these tiles without moving them.
        scores = _dot(keys, tl.trans(queries))
        if EDGE:
            scores = _masked(scores, query[None, :], key[:, None], S, True)
        weights = tl.exp2(scores * bits - log_sum[None, :])
        d_values += _dot(weights.to(grads.dtype), grads)
        d_scores = weights * (_dot(values, tl.trans(grads)) - delta[None, :])
        d_keys += _dot(d_scores.to(queries.dtype), queries)
    return d_keys, d_values


@triton.jit(do_not_specialize=_SIZES)
def _back_keys(q, k, v, d_out, lse, deltas, d_k, d_v, S, heads, groups, eights_k, eights_v, bits,
               scale, CAUSAL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr):  # fmt: skip
    """d_k and d_v of one block of keys of one group, over the queries of all its heads."""
    blocks = tl.cdiv(S, BN)
    lane = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BN
    b, g = lane // groups, lane % groups
    wide_k, wide_v = eights_k * 8, eights_v * 8
    key = start + tl.arange(0, BN)
    c_k, c_v = tl.arange(0, BK), tl.arange(0, BV)
    keys = _rows(_head(k, b, g, S, groups, wide_k), key, c_k, S, groups, wide_k)
    values = _rows(_head(v, b, g, S, groups, wide_v), key, c_v, S, groups, wide_v)
    d_keys = tl.zeros((BN, BK), tl.float32)
    d_values = tl.zeros((BN, BV), tl.float32)
    # Keys after the end of the sequence need no mask: their gradients are not stored.
    edge = 0
    if CAUSAL:
        edge = tl.minimum(tl.cdiv(start + BN, BM) * BM, S)
        d_keys, d_values = _add_to_keys(
            d_keys, d_values, keys, values, key, q, d_out, lse, deltas, b, g,
            start // BM * BM, edge, S, heads, groups, wide_k, wide_v, bits,
            True, BK, BV, BM,
        )  # fmt: skip
    d_keys, d_values = _add_to_keys(
        d_keys, d_values, keys, values, key, q, d_out, lse, deltas, b, g,
        edge, S, S, heads, groups, wide_k, wide_v, bits,
        False, BK, BV, BM,
    )  # fmt: skip
    _put(_head(d_k, b, g, S, groups, wide_k), scale * d_keys, key, c_k, S, groups, wide_k)
    _put(_head(d_v, b, g, S, groups, wide_v), d_values, key, c_v, S, groups, wide_v)


def _power(wide: int) -> int:
    return max(16, triton.next_power_of_2(wide))  # tensor cores multiply at least 16


class Attend(torch.autograd.Function):
    """softmax(scale q k^T) v; q [B, heads, S, wide], k, v [B, groups, S, wide], scale > 0.

    Widths are multiples of `ALIGN`. Token-major inputs are not copied; the result and all
    gradients are token-major.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale, causal):
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        B, S, heads, wide_k = q.shape
        groups, wide_v = v.shape[2:]
        assert scale > 0
        assert k.shape == (B, S, groups, wide_k)
        assert v.shape[:2] == (B, S)
        assert wide_k % ALIGN == wide_v % ALIGN == heads % groups == 0
        ctx.sizes = S, heads, groups, wide_k // ALIGN, wide_v // ALIGN
        ctx.scales = scale / math.log(2), scale
        ctx.blocks = causal, _power(wide_k), _power(wide_v)
        out = v.new_empty(B, S, heads, wide_v)
        lse = torch.empty(B, heads, S, device=q.device, dtype=torch.float32)
        _forward[(triton.cdiv(S, FORWARD[0]) * B * heads,)](
            q, k, v, out, lse, *ctx.sizes, ctx.scales[0], *ctx.blocks, *FORWARD, **LAUNCH
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        d_out = grad.transpose(1, 2).contiguous()
        d_q, d_k, d_v = (torch.empty_like(x) for x in (q, k, v))
        B, S, heads, _ = q.shape
        deltas = torch.empty_like(lse)
        rest = *ctx.sizes, *ctx.scales, *ctx.blocks
        _back_queries[(triton.cdiv(S, D_QUERIES[0]) * B * heads,)](
            q, k, v, out, d_out, lse, deltas, d_q, *rest, *D_QUERIES, **LAUNCH
        )
        _back_keys[(triton.cdiv(S, D_KEYS[1]) * B * k.shape[2],)](
            q, k, v, d_out, lse, deltas, d_k, d_v, *rest, *D_KEYS, **LAUNCH
        )
        return d_q.transpose(1, 2), d_k.transpose(1, 2), d_v.transpose(1, 2), None, None
