"""softmax(q k^T) v at inference: with equal lengths, with a cache, and for any widths.

Shapes: B sequences, H query heads, G key/value heads, S queries, T keys.
"""

import math
from contextlib import nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gaugelasso.kernels import band

# sdpa: PyTorch's fused attention, with widths padded to a common one. cudnn: the same, by cuDNN.
# blocks: scores of a block of queries at a time, for the keys that the block sees; faster on a CPU.
# For a GPU with Triton, and elsewhere as sdpa: narrow, one kernel on the rows of the product, at
# the widths of the heads; direct, a kernel that also rotates what it reads.
AttentionForm = Literal["sdpa", "cudnn", "blocks", "narrow", "direct"]
ROWS = ("narrow", "direct")
# The widest heads of their kernel, in bytes.
WIDEST = 256
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Queries of one block: its scores stay in the cache of a core, and a causal mask wastes little.
BLOCK = 128


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    form: AttentionForm = "sdpa",
    window: int | None = None,
) -> Tensor:
    """q [B, H, S, d_k], k [B, G, T, d_k], v [B, G, T, d_v] -> [B, H, S, d_v].

    The softmax scale is already in the queries. `mask` [B or 1, 1, S or 1, T] is True where a
    query sees a key. `causal` needs S = T. Give one of them or none. With `causal` and a `window`,
    a query sees that many keys at most, up to its own.
    """
    if form == "blocks":
        return _attend_blocks(q, k, v, causal, mask, window)
    if causal and window is not None:
        causal, mask = False, band(q.shape[2], window, q.device)
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    d_k, d_v = q.shape[-1], v.shape[-1]
    width = max(q.shape[-1], d_v)
    if q.is_cuda:  # the fused kernels there need multiples of 8
        width = -(-width // 8) * 8
    q, k, v = (_wide(t, width) for t in (q, k, v))
    # What cuDNN lacks, such as a precision, is left to the others.
    by_cudnn = form == "cudnn" and q.is_cuda and mask is None
    with sdpa_kernel(CUDNN_FIRST, set_priority=True) if by_cudnn else nullcontext():
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=1.0)
    if torch.compiler.is_compiling() and d_k < d_v:
        # Heads of padded queries lie apart, unless there is one position: a trace would exclude it.
        mixed = mixed.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    return mixed[..., :d_v]


def attend_one(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, form: AttentionForm = "sdpa"
) -> Tensor:
    """As `attend`, for one query of every sequence: q [B, H, d_k] -> [B, H, d_v].

    The heads of a group are queries of the same keys, which are not repeated.
    """
    batch, groups, seen, _ = k.shape
    q = q.unflatten(1, (groups, -1))
    if form != "blocks":
        return attend(q, k, v, mask=mask, form=form).flatten(1, 2)
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
    if mask is not None:
        scores.view(batch, -1, seen).masked_fill_(~mask[:, 0], -math.inf)
    mixed = torch.bmm(scores.softmax(2), v.flatten(0, 1))
    return mixed.view(batch, -1, v.shape[3])


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [..., 2 P or more] with their pairs turned: channels i and P + i by angle i."""
    turned = 2 * cos.shape[-1]
    first, second = heads[..., :turned].chunk(2, dim=-1)
    halves = [first * cos - second * sin, first * sin + second * cos]
    padding = [heads[..., turned:]] if heads.shape[-1] > turned else []
    return torch.cat(halves + padding, dim=-1)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """As `rotated`, in place."""
    first, second = heads.split(cos.shape[-1], dim=-1)[:2]
    turned = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(turned)


def fits_rows(widths: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether the kernel of rows takes heads of these padded widths."""
    return all(width % 8 == 0 and width * dtype.itemsize <= WIDEST for width in widths)


def _wide(heads: Tensor, width: int) -> Tensor:
    missing = width - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads  # padding by nothing is a copy


def _attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, window: int | None
) -> Tensor:
    batch, heads, length, _ = q.shape
    groups, keys = k.shape[1:3]
    repeats = heads // groups
    # The heads of one group stand together, as more queries of the same keys. Powers of two are
    # faster than those of e.
    q = (q / math.log(2)).unflatten(1, (groups, repeats)).flatten(0, 1)
    # One more channel of ones: the product with the weights gives their sum too.
    k, v = k.flatten(0, 1).transpose(1, 2), F.pad(v.flatten(0, 1), (0, 1), value=1.0)
    d_v = v.shape[2] - 1
    mixed = q.new_empty(batch * groups, repeats, length, d_v)
    # Adding this is faster than filling with a mask.
    ahead = torch.full((BLOCK, BLOCK), -math.inf, dtype=q.dtype, device=q.device).triu_(1)
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        size, first, last = stop - start, 0, stop if causal else keys
        if causal and window is not None:
            first = max(0, start - window + 1)
        seen = last - first
        scores = torch.bmm(
            q[:, :, start:stop].reshape(-1, repeats * size, q.shape[3]), k[..., first:last]
        )
        if causal:
            scores.view(-1, repeats, size, seen)[..., start - first :] += ahead[:size, :size]
        if causal and window is not None:
            # Of query i of the block, the keys up to i - window are behind the window.
            behind = torch.ones(size, seen, dtype=torch.bool, device=q.device)
            behind = behind.tril_(start - first - window)
            scores.view(-1, repeats, size, seen).masked_fill_(behind, -math.inf)
        if mask is not None:
            rows = mask if mask.shape[2] == 1 else mask[:, :, start:stop]
            every = scores.view(batch, -1, size, seen)
            every.masked_fill_(~rows, -math.inf)
        weights = scores.sub_(scores.amax(2, keepdim=True)).exp2_()
        share = torch.bmm(weights, v[:, first:last]).view(-1, repeats, size, d_v + 1)
        mixed[:, :, start:stop] = share[..., :d_v] / share[..., d_v:]
    return mixed.view(batch, heads, length, d_v)
