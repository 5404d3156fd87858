"""Matrix products of inference, with reads of the stream before them and writes after them.

The stream [N, D] has any strides: token by token or site by site. Nothing here has a gradient. The
references are the forms `gather` and `scatter` of `inference.stream`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.dispatch import check_offsets


@triton.jit
def _dot(a, b, total):
    # Tensor cores use 11 bits of a float32. tf32x3 multiplies high and low parts separately.
    return tl.dot(a, b, total, input_precision="tf32x3" if a.dtype == tl.float32 else None)


@triton.jit
def _read_product(x, sites, weight, maps, out, N, d, c, ld, x_token, x_site, first, eps,
                  GATED: tl.constexpr, DENSE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
                  BK: tl.constexpr):  # fmt: skip
    """out = factor (x[:, sites] @ maps); GATED: the first c columns times silu of the next c.

    The factor of a token is known when its last site is read, and passes through the product.
    """
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BC + tl.arange(0, BC)
    live, wanted = n < N, j < c
    level = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, BC), tl.float32)
    gate = tl.zeros((BM, BC), tl.float32)
    for start in range(0, d, BK):
        k = start + tl.arange(0, BK)
        real = k < d
        # The compiler sees that a dense stretch is contiguous.
        site = first + k if DENSE else tl.load(sites + k, mask=real, other=0).to(tl.int32)
        at = x + n[:, None] * x_token + site[None, :] * x_site
        rows = tl.load(at, mask=live[:, None] & real[None, :], other=0.0)
        values = rows.to(tl.float32)
        share = tl.load(weight + k, mask=real, other=0.0)
        level += tl.sum(values * values * share[None, :], axis=1)
        inside = real[:, None] & wanted[None, :]
        map_at = maps + k[:, None] * ld + j[None, :]
        total = _dot(rows, tl.load(map_at, mask=inside, other=0.0), total)
        if GATED:
            gate = _dot(rows, tl.load(map_at + c, mask=inside, other=0.0), gate)
    factor = tl.where(level > eps, tl.rsqrt(tl.maximum(level, eps)), 0.0)
    total = total * factor[:, None]
    if GATED:
        gate = gate * factor[:, None]
        total = total * gate * tl.sigmoid(gate)
    at = out + n[:, None] * c + j[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live[:, None] & wanted[None, :])


@triton.jit
def _product_write(h, maps, sites, x, N, f, d, ld, h_token, x_token, x_site, first,
                   DENSE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
                   BK: tl.constexpr):  # fmt: skip
    """x[:, sites] += h @ maps. The sites are different ones, so no two programs add to the same."""
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BC + tl.arange(0, BC)
    live, wanted = n < N, j < d
    total = tl.zeros((BM, BC), tl.float32)
    for start in range(0, f, BK):
        k = start + tl.arange(0, BK)
        real = k < f
        rows = tl.load(
            h + n[:, None] * h_token + k[None, :], mask=live[:, None] & real[None, :], other=0.0
        )
        inside = real[:, None] & wanted[None, :]
        total = _dot(
            rows, tl.load(maps + k[:, None] * ld + j[None, :], mask=inside, other=0.0), total
        )
    site = first + j if DENSE else tl.load(sites + j, mask=wanted, other=0).to(tl.int32)
    at = x + n[:, None] * x_token + site[None, :] * x_site
    both = live[:, None] & wanted[None, :]
    sum_ = tl.load(at, mask=both, other=0.0).to(tl.float32) + total
    tl.store(at, sum_.to(x.dtype.element_ty), mask=both)


def _tile(tokens: int, columns: int, inner: int, gated: bool) -> dict[str, int]:
    """Tokens, columns and inner channels of a program, its warps and stages.

    Few tokens are distributed over as many programs as there are blocks of columns.
    """
    power = triton.next_power_of_2
    deep = min(64, max(16, power(inner)))
    if tokens <= 512:
        narrow = 16 if tokens <= 16 else 32
        return {"BM": narrow, "BC": min(32, max(16, power(columns))), "BK": min(128, 2 * deep),
                "num_warps": 4, "num_stages": 3}  # fmt: skip
    widest = 64 if gated else 128
    columns = min(widest, max(16, power(columns)))
    return {"BM": 128, "BC": columns, "BK": min(deep, 32 if columns > 64 else 64),
            "num_warps": 8 if columns > 32 else 4, "num_stages": 3}  # fmt: skip


def read_product(
    x: Tensor,
    sites: Tensor,
    weight: Tensor,
    maps: Tensor,
    eps: float,
    *,
    gated: bool = False,
    first: int | None = None,
) -> Tensor:
    """maps^T n with n_j = x[s_j] / sqrt(sum_i weight_i x[s_i]^2), for every token: [N, c].

    x [N, D], sites [d], weight [d] in float32, maps [d, c]. With `gated`, maps are [d, 2 c], and
    the result is the first half times silu of the second. `first` says that the sites are the d
    adjacent ones from there on.
    """
    tokens, d = x.shape[0], len(sites)
    c = maps.shape[1] // 2 if gated else maps.shape[1]
    check_offsets(max(x.shape[1], c), tokens)
    out = torch.empty(tokens, c, dtype=x.dtype, device=x.device)
    tile = _tile(tokens, c, d, gated)
    grid = (triton.cdiv(tokens, tile["BM"]), triton.cdiv(c, tile["BC"]))
    if tokens and c:
        _read_product[grid](
            x, sites, weight, maps, out, tokens, d, c, maps.stride(0), *x.stride(), first or 0, eps,
            GATED=gated, DENSE=first is not None, **tile,
        )  # fmt: skip
    return out


def product_write_(
    x: Tensor, h: Tensor, maps: Tensor, sites: Tensor, *, first: int | None = None
) -> Tensor:
    """x[:, t_j] += (h @ maps)_j in place, and x: x [N, D], h [N, f], maps [f, d], sites [d]."""
    tokens, d = x.shape[0], len(sites)
    h = h.contiguous()
    check_offsets(max(x.shape[1], h.shape[1]), tokens)
    tile = _tile(tokens, d, h.shape[1], False)
    grid = (triton.cdiv(tokens, tile["BM"]), triton.cdiv(d, tile["BC"]))
    if tokens and d:
        _product_write[grid](
            h, maps, sites, x, tokens, h.shape[1], d, maps.stride(0), h.stride(0), *x.stride(),
            first or 0, DENSE=first is not None, **tile,
        )  # fmt: skip
    return x
