"""Matrix products of inference, with reads of the stream before them and writes after them.

The stream [N, D] has any strides: token by token or site by site. Nothing here has a gradient. The
references are the forms `gather` and `scatter` of `inference.stream`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.dispatch import check_offsets
from gaugelasso.kernels.stream import EPS
from gaugelasso.kernels.tiles import FEW, Tile

# Differs between operators: without this, a kernel would be compiled for some of its values.
_ANY = ["first"]


@triton.jit
def _dot(a, b, total):
    # Tensor cores use 11 bits of a float32. tf32x3 multiplies high and low parts separately.
    return tl.dot(a, b, total, input_precision="tf32x3" if a.dtype == tl.float32 else None)


@triton.jit
def _factor(level, least):
    """1 / sqrt(level); 0 below the least level, where there is no signal."""
    return tl.where(level > least, tl.rsqrt(tl.maximum(level, least)), 0.0)


@triton.jit
def _block(columns, BC: tl.constexpr):
    """This program's blocks of tokens and columns: neighbours share the tokens, in the cache."""
    blocks = tl.cdiv(columns, BC)
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks


@triton.jit(do_not_specialize=_ANY)
def _read_product(x, sites, weight, factors, maps, out, N, d, c, ld, x_token, x_site, first, eps,
                  least, GATED: tl.constexpr, DENSE: tl.constexpr, NORM: tl.constexpr,
                  BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """out = factor (x[:, sites] @ maps); GATED: the first c columns times silu of the next c.

    NORM says where the factor of a token is from: "given"; "measured", known when the last site is
    read, as it passes through the product; or "none", which is 1. With DENSE the first site is
    16 `first`.
    """
    row, column = _block(c, BC)
    n = row * BM + tl.arange(0, BM)
    j = column * BC + tl.arange(0, BC)
    live, wanted = n < N, j < c
    level = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, BC), tl.float32)
    gate = tl.zeros((BM, BC), tl.float32)
    for start in range(0, d, BK):
        k = start + tl.arange(0, BK)
        real = k < d
        # The compiler sees that a dense stretch is contiguous.
        site = 16 * first + k if DENSE else tl.load(sites + k, mask=real, other=0).to(tl.int32)
        at = x + n[:, None] * x_token + site[None, :] * x_site
        rows = tl.load(at, mask=live[:, None] & real[None, :], other=0.0)
        if NORM == "measured":
            values = rows.to(tl.float32)
            share = tl.load(weight + k, mask=real, other=0.0)
            level += tl.sum(values * values * share[None, :], axis=1)
        inside = real[:, None] & wanted[None, :]
        map_at = maps + k[:, None] * ld + j[None, :]
        total = _dot(rows, tl.load(map_at, mask=inside, other=0.0), total)
        if GATED:
            gate = _dot(rows, tl.load(map_at + c, mask=inside, other=0.0), gate)
    if NORM != "none":
        if NORM == "given":
            factor = tl.load(factors + n, mask=live, other=0.0)
        else:
            factor = _factor(level + eps, least)
        total = total * factor[:, None]
        gate = gate * factor[:, None]
    if GATED:
        total = total * gate * tl.sigmoid(gate)
    at = out + n[:, None] * c + j[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live[:, None] & wanted[None, :])


@triton.jit(do_not_specialize=_ANY)
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


@triton.jit(do_not_specialize=_ANY)
def _normalise(x, sites, weight, factors, out, N, d, c, x_token, x_site, out_token, out_site, first,
               eps, least, DENSE: tl.constexpr, COPY: tl.constexpr, BM: tl.constexpr,
               BK: tl.constexpr):  # fmt: skip
    """The factor of every token; COPY: the sites times it instead, and zeros up to column c."""
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    live = n < N
    level = tl.zeros((BM,), tl.float32)
    for start in range(0, d, BK):
        k = start + tl.arange(0, BK)
        real = k < d
        site = 16 * first + k if DENSE else tl.load(sites + k, mask=real, other=0).to(tl.int32)
        at = x + n[:, None] * x_token + site[None, :] * x_site
        values = tl.load(at, mask=live[:, None] & real[None, :], other=0.0).to(tl.float32)
        share = tl.load(weight + k, mask=real, other=0.0)
        level += tl.sum(values * values * share[None, :], axis=1)
    factor = _factor(level + eps, least)
    if COPY:
        for start in range(0, c, BK):
            k = start + tl.arange(0, BK)
            real = k < d
            site = 16 * first + k if DENSE else tl.load(sites + k, mask=real, other=0).to(tl.int32)
            at = x + n[:, None] * x_token + site[None, :] * x_site
            rows = tl.load(at, mask=live[:, None] & real[None, :], other=0.0).to(tl.float32)
            to = out + n[:, None] * out_token + k[None, :] * out_site
            normal = (rows * factor[:, None]).to(out.dtype.element_ty)
            tl.store(to, normal, mask=live[:, None] & (k < c)[None, :])
    else:
        tl.store(factors + n, factor, mask=live)


@triton.jit
def _swiglu(rows, out, N, c, BM: tl.constexpr, BC: tl.constexpr):
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BC + tl.arange(0, BC)
    both = (n < N)[:, None] & (j < c)[None, :]
    at = rows + n[:, None] * (2 * c) + j[None, :]
    up = tl.load(at, mask=both, other=0.0).to(tl.float32)
    gate = tl.load(at + c, mask=both, other=0.0).to(tl.float32)
    value = (up * gate * tl.sigmoid(gate)).to(out.dtype.element_ty)
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


def _dense(first: int | None) -> dict[str, int | bool]:
    """Whether the sites are adjacent and begin at a multiple of 16, and at which one."""
    dense = first is not None and first % 16 == 0
    return {"first": (first or 0) // 16 if dense else 0, "DENSE": dense}


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
    norm = "measured" if factors is None else "given"
    factors = weight if factors is None else factors
    return _product(x, sites, weight, factors, maps, len(sites), eps, gated, norm, first, tile)


def gated_product(x: Tensor, maps: Tensor, tile: Tile | None = None) -> Tensor:
    """x @ maps, the first half of the columns times silu of the second; x [N, d], maps [d, 2 c]."""
    return _product(x, maps, maps, maps, maps, len(maps), 0.0, True, "none", 0, tile)


def _product(x, sites, weight, factors, maps, d, eps, gated, norm, first, tile):
    tokens, c = x.shape[0], maps.shape[1] // 2 if gated else maps.shape[1]
    check_offsets(max(x.shape[1], c), tokens)
    out = torch.empty(tokens, c, dtype=x.dtype, device=x.device)
    tile = tile or _tile(tokens, c, d, gated, x.element_size())
    grid = (triton.cdiv(tokens, tile.tokens) * triton.cdiv(c, tile.columns),)
    if tokens and c:
        _read_product[grid](
            x, sites, weight, factors, maps, out, tokens, d, c, maps.stride(0), *x.stride(),
            eps=eps, least=EPS, GATED=gated, NORM=norm, **_dense(first), **_launch(tile),
        )  # fmt: skip
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
            **_dense(first), **_launch(tile),
        )  # fmt: skip
    return x


def _normalised(x, sites, weight, eps, first, out, copy):
    tokens = x.shape[0]
    check_offsets(x.shape[1], tokens)
    wide = triton.next_power_of_2(max(16, len(sites)))
    if x.stride(1) == 1:
        tile = {"BM": 16, "BK": min(256, wide)}
    else:  # as much in flight as registers hold: the loads of the next block wait for this one's
        tile = {"BM": 64, "BK": min(128, wide)}
    c, strides = (out.shape[1], out.stride()) if copy else (0, (0, 0))
    if tokens:
        _normalise[(triton.cdiv(tokens, tile["BM"]),)](
            x, sites, weight, out, out, tokens, len(sites), c, *x.stride(), *strides, eps=eps,
            least=EPS, COPY=copy, num_warps=4, **_dense(first), **tile,
        )  # fmt: skip
    return out


def norm_factors(
    x: Tensor, sites: Tensor, weight: Tensor, eps: float, *, first: int | None = None
) -> Tensor:
    """1 / sqrt(eps + sum_i weight_i x[s_i]^2) of every token [N], in float32; 0 without signal."""
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    return _normalised(x, sites, weight, eps, first, out, False)


def normalised_sites(
    x: Tensor,
    sites: Tensor,
    weight: Tensor,
    eps: float,
    columns: int,
    *,
    first: int | None = None,
    by_token: bool | None = None,
) -> Tensor:
    """x[:, sites] times `norm_factors`, and zeros up to a number of columns.

    With `by_token` the result is contiguous, without it site by site; by default ordered as x is.
    """
    if x.stride(1) == 1 if by_token is None else by_token:
        out = torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device)
    else:
        out = torch.empty(columns, x.shape[0], dtype=x.dtype, device=x.device).T
    return _normalised(x, sites, weight, eps, first, out, True)


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
