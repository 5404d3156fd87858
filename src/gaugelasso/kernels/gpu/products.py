"""Matrix products of inference, with reads of the stream before them and writes after them.

The stream [N, D] has any strides: token by token or site by site. Nothing here has a gradient. The
references are the forms `gather` and `scatter` of `inference.stream`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.dispatch import check_offsets
from gaugelasso.kernels.gpu.levels import ANY_FIRST, _factor, _squares, dense
from gaugelasso.kernels.stream import EPS
from gaugelasso.kernels.tiles import FEW, Tile


@triton.jit
def _dot(a, b, total):
    # Tensor cores use 11 bits of a float32. tf32x3 multiplies high and low parts separately.
    return tl.dot(a, b, total, input_precision="tf32x3" if a.dtype == tl.float32 else None)


@triton.jit
def _swish(up, gate):
    """up silu(gate)."""
    # In nine instructions instead of the thirteen of `tl.sigmoid`.
    return up * gate / (1.0 + tl.exp2(gate * -1.4426950408889634))


@triton.jit
def _block(columns, BC: tl.constexpr):
    """This program's blocks of tokens and columns: neighbours share the tokens, in the cache."""
    blocks = tl.cdiv(columns, BC)
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks


@triton.jit(do_not_specialize=ANY_FIRST)
def _read_product(x, sites, weight, factors, maps, out, N, d, c, ld, x_token, x_site, first, eps,
                  least, GATED: tl.constexpr, DENSE: tl.constexpr, MEASURED: tl.constexpr,
                  BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """out = factor (x[:, sites] @ maps); GATED: the first c columns times silu of the next c.

    The factor of a token is given, or MEASURED, from all sites that are read. With DENSE the sites
    are adjacent, and the first is 16 `first`.
    """
    row, column = _block(c, BC)
    n = row * BM + tl.arange(0, BM)
    j = column * BC + tl.arange(0, BC)
    live, wanted = n < N, j < c
    level = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, BC), tl.float32)
    gate = tl.zeros((BM, BC), tl.float32)
    # Few tokens are measured on their way to the product. Of many, and of a dense stretch, the
    # product reads shared memory while it runs. Written in one loop, Triton (3.6 and 3.9) copies
    # the next block over the one that is read, so that is read twice.
    apart: tl.constexpr = MEASURED and (DENSE or BM >= 64)
    if apart:
        for start in range(0, d, BK):
            k = start + tl.arange(0, BK)
            real = k < d
            site = 16 * first + k if DENSE else tl.load(sites + k, mask=real, other=0).to(tl.int32)
            at = x + n[:, None] * x_token + site[None, :] * x_site
            level += _squares(tl.load(at, mask=live[:, None] & real[None, :], other=0.0),
                              weight, k, real)  # fmt: skip
    for start in range(0, d, BK):
        k = start + tl.arange(0, BK)
        real = k < d
        # The compiler sees that a dense stretch is contiguous.
        site = 16 * first + k if DENSE else tl.load(sites + k, mask=real, other=0).to(tl.int32)
        at = x + n[:, None] * x_token + site[None, :] * x_site
        rows = tl.load(at, mask=live[:, None] & real[None, :], other=0.0)
        if MEASURED and not apart:
            level += _squares(rows, weight, k, real)
        inside = real[:, None] & wanted[None, :]
        map_at = maps + k[:, None] * ld + j[None, :]
        total = _dot(rows, tl.load(map_at, mask=inside, other=0.0), total)
        if GATED:
            gate = _dot(rows, tl.load(map_at + c, mask=inside, other=0.0), gate)
    if MEASURED:  # noqa: SIM108 (known when the kernel is compiled)
        factor = _factor(level + eps, least)
    else:
        factor = tl.load(factors + n, mask=live, other=0.0)
    total = total * factor[:, None]
    if GATED:
        total = _swish(total, gate * factor[:, None])
    at = out + n[:, None] * c + j[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live[:, None] & wanted[None, :])


@triton.jit
def _paired_product(x, maps, out, N, d, c, BM: tl.constexpr, BC: tl.constexpr,
                    BK: tl.constexpr):  # fmt: skip
    """out[:, i] = column 2 i of x @ maps times silu of column 2 i + 1; there are c columns."""
    row, column = _block(c, BC)
    n = row * BM + tl.arange(0, BM)
    j = column * BC + tl.arange(0, BC)
    live, wanted = n < N, j < c
    total = tl.zeros((BM, BC), tl.float32)
    for start in range(0, d, BK):
        k = start + tl.arange(0, BK)
        real = k < d
        rows = tl.load(
            x + n[:, None] * d + k[None, :], mask=live[:, None] & real[None, :], other=0.0
        )
        inside = real[:, None] & wanted[None, :]
        total = _dot(
            rows, tl.load(maps + k[:, None] * c + j[None, :], mask=inside, other=0.0), total
        )
    # A thread has both columns of a pair.
    up, gate = tl.split(tl.reshape(total, (BM, BC // 2, 2)))
    i = column * (BC // 2) + tl.arange(0, BC // 2)
    at = out + n[:, None] * (c // 2) + i[None, :]
    value = _swish(up, gate).to(out.dtype.element_ty)
    tl.store(at, value, mask=live[:, None] & (i < c // 2)[None, :])


@triton.jit(do_not_specialize=ANY_FIRST)
def _product_write(h, maps, sites, x, N, f, d, c, h_token, x_token, x_site, first,
                   DENSE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
                   BK: tl.constexpr):  # fmt: skip
    """x[:, sites] += h @ maps. The sites are different ones, so no two programs add to the same.

    Rows of maps have c columns, of which d are real.
    """
    row, column = _block(d, BC)
    n = row * BM + tl.arange(0, BM)
    j = column * BC + tl.arange(0, BC)
    live, wanted, stored = n < N, j < d, j < c
    total = tl.zeros((BM, BC), tl.float32)
    for start in range(0, f, BK):
        k = start + tl.arange(0, BK)
        real = k < f
        rows = tl.load(
            h + n[:, None] * h_token + k[None, :], mask=live[:, None] & real[None, :], other=0.0
        )
        inside = real[:, None] & stored[None, :]
        total = _dot(
            rows, tl.load(maps + k[:, None] * c + j[None, :], mask=inside, other=0.0), total
        )
    site = 16 * first + j if DENSE else tl.load(sites + j, mask=wanted, other=0).to(tl.int32)
    at = x + n[:, None] * x_token + site[None, :] * x_site
    both = live[:, None] & wanted[None, :]
    sum_ = tl.load(at, mask=both, other=0.0).to(tl.float32) + total
    tl.store(at, sum_.to(x.dtype.element_ty), mask=both)


@triton.jit
def _swiglu(rows, out, N, c, BM: tl.constexpr, BC: tl.constexpr):
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BC + tl.arange(0, BC)
    both = (n < N)[:, None] & (j < c)[None, :]
    at = rows + n[:, None] * (2 * c) + j[None, :]
    up = tl.load(at, mask=both, other=0.0).to(tl.float32)
    gate = tl.load(at + c, mask=both, other=0.0).to(tl.float32)
    value = _swish(up, gate).to(out.dtype.element_ty)
    tl.store(out + n[:, None] * c + j[None, :], value, mask=both)


def _tile(tokens: int, columns: int, inner: int, gated: bool, itemsize: int) -> Tile:
    """The tile of a product where none was measured; it fits into 96 KB of shared memory."""
    power = triton.next_power_of_2
    deep = min(128 // itemsize, max(16, power(inner)))
    columns = max(16, power(columns))
    if tokens <= FEW:
        return Tile(16 if tokens <= 16 else 32, min(32, columns), 2 * deep, 4, 3)
    return Tile(128, min(64 if gated else 128, columns), deep, 8, 3)


def _launch(tile: Tile) -> dict[str, int]:
    return {"BM": tile.tokens, "BC": tile.columns, "BK": tile.inner, "num_warps": tile.warps,
            "num_stages": tile.stages}  # fmt: skip


def read_product(
    x: Tensor,
    sites: Tensor,
    weight: Tensor,
    maps: Tensor,
    eps: float,
    *,
    gated: bool = False,
    first: int | None = None,
    factors: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """maps^T n with n_j = x[s_j] / sqrt(eps + sum_i weight_i x[s_i]^2), for every token: [N, c].

    x [N, D], sites [d], weight [d] in float32, maps [d, c]. With `gated`, maps are [d, 2 c], and
    the result is the first half times silu of the second. `first` says that the sites are the d
    adjacent ones from there on. `factors` [N], if given, are those of `norm_factors`.
    """
    tokens, c = x.shape[0], maps.shape[1] // 2 if gated else maps.shape[1]
    check_offsets(max(x.shape[1], c), tokens)
    out = torch.empty(tokens, c, dtype=x.dtype, device=x.device)
    tile = tile or _tile(tokens, c, len(sites), gated, x.element_size())
    grid = (triton.cdiv(tokens, tile.tokens) * triton.cdiv(c, tile.columns),)
    if tokens and c:
        _read_product[grid](
            x, sites, weight, weight if factors is None else factors, maps, out, tokens, len(sites),
            c, maps.stride(0), *x.stride(), eps=eps, least=EPS, GATED=gated,
            MEASURED=factors is None, **dense(first), **_launch(tile),
        )  # fmt: skip
    return out


def paired_product(x: Tensor, maps: Tensor, tile: Tile | None = None) -> Tensor:
    """x @ maps, every even column times silu of the next: x [N, d], maps [d, 2 c] -> [N, c].

    One sum for both makes wider products, which tensor cores do faster.
    """
    x, maps = x.contiguous(), maps.contiguous()
    tokens, columns = x.shape[0], maps.shape[1]
    check_offsets(max(x.shape[1], columns), tokens)
    out = x.new_empty(tokens, columns // 2)
    tile = tile or _tile(tokens, columns, len(maps), False, x.element_size())
    grid = (triton.cdiv(tokens, tile.tokens) * triton.cdiv(columns, tile.columns),)
    if tokens and columns:
        _paired_product[grid](x, maps, out, tokens, len(maps), columns, **_launch(tile))
    return out


def product_write_(
    x: Tensor,
    h: Tensor,
    maps: Tensor,
    sites: Tensor,
    *,
    first: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """x[:, t_j] += (h @ maps)_j in place, and x: x [N, D], h [N, f], maps [f, >= d], sites [d]."""
    tokens, d = x.shape[0], len(sites)
    h, maps = h.contiguous(), maps.contiguous()
    check_offsets(max(x.shape[1], h.shape[1]), tokens)
    tile = tile or _tile(tokens, d, h.shape[1], False, x.element_size())
    grid = (triton.cdiv(tokens, tile.tokens) * triton.cdiv(d, tile.columns),)
    if tokens and d:
        _product_write[grid](
            h, maps, sites, x, tokens, h.shape[1], d, maps.shape[1], h.stride(0), *x.stride(),
            **dense(first), **_launch(tile),
        )  # fmt: skip
    return x


def swiglu(rows: Tensor) -> Tensor:
    """The first half of the columns times silu of the second: [N, 2 c] -> [N, c]."""
    rows = rows.contiguous()
    tokens, c = rows.shape[0], rows.shape[1] // 2
    check_offsets(rows.shape[1], tokens)
    out = rows.new_empty(tokens, c)
    tile = {"BM": 8, "BC": min(256, max(16, triton.next_power_of_2(c)))}
    if tokens and c:
        grid = (triton.cdiv(tokens, tile["BM"]), triton.cdiv(c, tile["BC"]))
        _swiglu[grid](rows, out, tokens, c, num_warps=4, **tile)
    return out
