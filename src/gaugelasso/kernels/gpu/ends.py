"""The ends of a pass at inference: tokens to the stream, and the bookkeeping of drawn tokens.

References: `inference.operators.Embedding` and `inference.graphs.Decoder` without kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.dispatch import check_offsets


@triton.jit
def _embed(tokens, table, places, at, out, N, S, D, V, length, out_token, out_site,
           PLACES: tl.constexpr, PLACED: tl.constexpr, BT: tl.constexpr,
           BD: tl.constexpr):  # fmt: skip
    """A token or a position that is not in its table gives NaN, so that the error is noticed."""
    n = tl.program_id(0) * BT + tl.arange(0, BT)
    j = tl.program_id(1) * BD + tl.arange(0, BD)
    live = n < N
    both = live[:, None] & (j < D)[None, :]
    token = tl.load(tokens + n, mask=live, other=0)
    known = ((token >= 0) & (token < V))[:, None]
    x = tl.load(table + token[:, None] * D + j[None, :], mask=both & known, other=0.0)
    x = tl.where(known, x, float("nan"))
    if PLACES:
        t = (n % S).to(tl.int64)
        if PLACED:
            t = tl.load(at + n, mask=live, other=0)
        there = ((t >= 0) & (t < length))[:, None]
        more = tl.load(places + t[:, None] * D + j[None, :], mask=both & there, other=0.0)
        x = x.to(tl.float32) + tl.where(there, more.to(tl.float32), float("nan"))
    to = out + n[:, None] * out_token + j[None, :] * out_site
    tl.store(to, x.to(out.dtype.element_ty), mask=both)


@triton.jit
def _note(new, drawn, stopped, stops, out, at, counts, B, columns, nothing, BB: tl.constexpr):
    """One program, because the column is the same for all sequences and moves at the end."""
    column = tl.load(at)
    for first in range(0, B, BB):
        b = first + tl.arange(0, BB)
        live = b < B
        token = tl.load(new + b, mask=live, other=0)
        over = tl.load(stopped + b, mask=live, other=1) != 0
        tl.store(out + b * columns + column, tl.where(over, nothing, token), mask=live)
        tl.store(drawn + b, token, mask=live)
        ends = tl.load(stops + token, mask=live, other=0) != 0
        tl.store(stopped + b, (over | ends).to(tl.uint8), mask=live)
        tl.store(counts + b, tl.load(counts + b, mask=live, other=0) + 1, mask=live)
    tl.debug_barrier()  # every thread has read the column
    tl.store(at, column + 1)


def embed(
    tokens: Tensor, table: Tensor, positions: Tensor | None, at: Tensor | None, by_site: bool
) -> Tensor:
    """table[token] + positions[at] for tokens [B, S]: [N, D], token by token or site by site.

    Positions `at` [B, S] count from 0 where none are given. Tokens and positions that have no row
    give NaN.
    """
    size, (count, width) = tokens.shape[1], (tokens.numel(), table.shape[1])
    check_offsets(width, count)
    out = table.new_empty((width, count) if by_site else (count, width))
    out = out.T if by_site else out
    tokens = tokens.contiguous()
    block = {"BT": 64, "BD": 64} if count >= 64 else {"BT": 1, "BD": 256}
    if count:
        grid = (triton.cdiv(count, block["BT"]), triton.cdiv(width, block["BD"]))
        _embed[grid](
            tokens, table, table if positions is None else positions,
            tokens if at is None else at.contiguous(), out, count, size, width, len(table),
            0 if positions is None else len(positions), *out.stride(),
            PLACES=positions is not None, PLACED=at is not None, **block,
        )  # fmt: skip
    return out


def note_drawn_(
    new: Tensor, drawn: Tensor, stopped: Tensor, stops: Tensor, out: Tensor, at: Tensor,
    counts: Tensor, nothing: int,
) -> None:  # fmt: skip
    """Store new tokens [B] in column `at` of out [B, block] and in `drawn`, and move on.

    A sequence that has stopped shows `nothing`. A token of `stops` [V] stops its sequence.
    """
    batch = len(new)
    _note[(1,)](
        new.contiguous(), drawn, stopped.view(torch.uint8), stops.view(torch.uint8), out, at,
        counts, batch, out.shape[1], nothing, BB=min(1024, triton.next_power_of_2(batch)),
    )  # fmt: skip
