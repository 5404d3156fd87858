"""A whole MLP of many tokens in one kernel: what lies between its maps never leaves the chip.

A program has all sites, filters and outputs of its tokens. No other program touches these tokens,
so it adds to the stream in place. Nothing here has a gradient. The reference is
`inference.operators.Mlp` in parts.
"""

import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.dispatch import check_offsets
from gaugelasso.kernels.gpu.levels import _factor, _squares, dense
from gaugelasso.kernels.gpu.products import _dot, _swish
from gaugelasso.kernels.stream import EPS
from gaugelasso.kernels.tiles import Tile


@triton.jit
def _sites(x, sites, n, k, N, d, x_token, x_site, first, DENSE: tl.constexpr):
    """Some sites of the stream, by their numbers in the read; zeros beyond the last."""
    real = k < d
    site = 16 * first + k if DENSE else tl.load(sites + k, mask=real, other=0).to(tl.int32)
    at = x + n[:, None] * x_token + site[None, :] * x_site
    return tl.load(at, mask=(n < N)[:, None] & real[None, :], other=0.0)


@triton.jit
def _gated(up, gate, rows, maps, k, j, d, f):
    """Both sums plus what some sites add to the filters j."""
    at = maps + k[:, None] * (2 * f) + j[None, :]
    inside = (k < d)[:, None] & (j < f)[None, :]
    up = _dot(rows, tl.load(at, mask=inside, other=0.0), up)
    gate = _dot(rows, tl.load(at + f, mask=inside, other=0.0), gate)
    return up, gate


@triton.jit(do_not_specialize=["first", "first_to"])
def _mlp(x, sites, weight, maps, down, targets, N, d, f, w, ld, x_token, x_site, first, first_to,
         eps, least, DENSE: tl.constexpr, DENSE_TO: tl.constexpr, R1: tl.constexpr,
         R2: tl.constexpr, R3: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr,
         BW: tl.constexpr):  # fmt: skip
    """BM tokens. The d sites come in up to three blocks of R1, R2 and R3, the filters BF by BF."""
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    k1 = tl.arange(0, R1)
    rows1 = _sites(x, sites, n, k1, N, d, x_token, x_site, first, DENSE)
    level = _squares(rows1, weight, k1, k1 < d)
    if R2 > 0:
        k2 = R1 + tl.arange(0, R2)
        rows2 = _sites(x, sites, n, k2, N, d, x_token, x_site, first, DENSE)
        level += _squares(rows2, weight, k2, k2 < d)
    if R3 > 0:
        k3 = R1 + R2 + tl.arange(0, R3)
        rows3 = _sites(x, sites, n, k3, N, d, x_token, x_site, first, DENSE)
        level += _squares(rows3, weight, k3, k3 < d)
    factor = _factor(level + eps, least)[:, None]
    column = tl.arange(0, BW)
    out = tl.zeros((BM, BW), tl.float32)
    for start in range(0, f, BF):
        j = start + tl.arange(0, BF)
        up = tl.zeros((BM, BF), tl.float32)
        gate = tl.zeros((BM, BF), tl.float32)
        up, gate = _gated(up, gate, rows1, maps, k1, j, d, f)
        if R2 > 0:
            up, gate = _gated(up, gate, rows2, maps, k2, j, d, f)
        if R3 > 0:
            up, gate = _gated(up, gate, rows3, maps, k3, j, d, f)
        # The sums are normalised, not the sites: these go to the product as they were read, without
        # another copy of them in registers.
        h = _swish(up * factor, gate * factor).to(x.dtype.element_ty)
        inside = (j < f)[:, None] & (column < ld)[None, :]
        written = tl.load(down + j[:, None] * ld + column[None, :], mask=inside, other=0.0)
        out = _dot(h, written, out)
    tl.debug_barrier()  # all threads have read the sites that are now written
    real = column < w
    to = 16 * first_to + column
    if not DENSE_TO:
        to = tl.load(targets + column, mask=real, other=0).to(tl.int32)
    at = x + n[:, None] * x_token + to[None, :] * x_site
    both = (n < N)[:, None] & real[None, :]
    total = tl.load(at, mask=both, other=0.0).to(tl.float32) + out
    tl.store(at, total.to(x.dtype.element_ty), mask=both)


def _pieces(d: int) -> tuple[int, int, int]:
    """Powers of two from 16 on, and zeros, that cover d sites with few beyond them."""
    pieces = []
    for last in (False, False, True):
        power = triton.next_power_of_2(max(16, d))
        if not last and power - d > 16:
            power //= 2
        pieces.append(power if d > 0 else 0)
        d -= power
    return pieces[0], pieces[1], pieces[2]


def mlp_(
    x: Tensor,
    read: tuple[Tensor, Tensor, Tensor],
    write: tuple[Tensor, Tensor],
    eps: float,
    tile: Tile,
    *,
    firsts: tuple[int | None, int | None] = (None, None),
) -> Tensor:
    """x plus the outputs of an MLP, in place: x [N, D].

    `read` is (sites [d], weight [d], maps [d, 2 f]), `write` (maps [f, >= w], sites [w]). `firsts`
    say that the sites of the read, or of the write, are the adjacent ones from there on. The tile
    has tokens and filters.
    """
    (sites, weight, maps), (down, targets) = read, write
    maps, down = maps.contiguous(), down.contiguous()
    tokens, f, w = len(x), maps.shape[1] // 2, len(targets)
    check_offsets(x.shape[1], tokens)
    if not tokens or not len(sites) or not f or not w:
        return x
    (first, is_dense), (first_to, is_dense_to) = (dense(each).values() for each in firsts)
    r1, r2, r3 = _pieces(len(sites))
    _mlp[(triton.cdiv(tokens, tile.tokens),)](
        x, sites, weight, maps, down, targets, tokens, len(sites), f, w, down.shape[1],
        *x.stride(), first, first_to, eps, EPS, DENSE=is_dense, DENSE_TO=is_dense_to, R1=r1, R2=r2,
        R3=r3, BM=tile.tokens, BF=tile.columns, BW=max(16, triton.next_power_of_2(w)),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return x
