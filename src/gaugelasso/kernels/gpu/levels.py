"""Normalisers of inference: the level of every token over the sites that an operator reads.

The stream [N, D] has any strides: token by token or site by site. Nothing here has a gradient. The
references are the forms of `inference.stream` without kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.dispatch import check_offsets
from gaugelasso.kernels.stream import EPS

# Differs between operators: without this, a kernel would be compiled for some of its values.
ANY_FIRST = ["first"]


@triton.jit
def _factor(level, least):
    """1 / sqrt(level); 0 below the least level, where there is no signal."""
    return tl.where(level > least, tl.rsqrt(tl.maximum(level, least)), 0.0)


@triton.jit
def _squares(rows, weight, k, real):
    """What a block of sites adds to the level of its tokens."""
    values = rows.to(tl.float32)
    share = tl.load(weight + k, mask=real, other=0.0)
    return tl.sum(values * values * share[None, :], axis=1)


@triton.jit(do_not_specialize=ANY_FIRST)
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
        rows = tl.load(at, mask=live[:, None] & real[None, :], other=0.0)
        level += _squares(rows, weight, k, real)
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


def dense(first: int | None) -> dict[str, int | bool]:
    """Whether the sites are adjacent and begin at a multiple of 16, and at which one."""
    dense = first is not None and first % 16 == 0
    return {"first": (first or 0) // 16 if dense else 0, "DENSE": dense}


def _normalised(x, sites, weight, eps, first, out, copy):
    tokens = x.shape[0]
    check_offsets(max(x.shape[1], out.shape[1] if copy else 1), tokens)
    wide = triton.next_power_of_2(max(16, len(sites)))
    if x.stride(1) == 1:
        tile = {"BM": 16, "BK": min(256, wide)}
    else:  # as much in flight as registers hold: the loads of the next block wait for this one's
        tile = {"BM": 64, "BK": min(128, wide)}
    c, strides = (out.shape[1], out.stride()) if copy else (0, (0, 0))
    if tokens:
        _normalise[(triton.cdiv(tokens, tile["BM"]),)](
            x, sites, weight, out, out, tokens, len(sites), c, *x.stride(), *strides, eps=eps,
            least=EPS, COPY=copy, num_warps=4, **dense(first), **tile,
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
