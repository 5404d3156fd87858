"""softmax(q k^T) v at inference: with equal lengths, with a cache, and for any widths.

Shapes: B sequences, H query heads, G key/value heads, S queries, T keys.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# sdpa: PyTorch's fused attention, with widths padded to a common one. blocks: scores of a block
# of queries at a time, for the keys that the block sees; faster on a CPU.
AttentionForm = Literal["sdpa", "blocks"]
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
) -> Tensor:
    """q [B, H, S, d_k], k [B, G, T, d_k], v [B, G, T, d_v] -> [B, H, S, d_v].

    The softmax scale is already in the queries. `mask` [B or 1, 1, S or 1, T] is True where a
    query sees a key. `causal` needs S = T. Give one of them or none.
    """
    if form == "blocks":
        return _attend_blocks(q, k, v, causal, mask)
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    d_v = v.shape[-1]
    width = max(q.shape[-1], d_v)
    if q.is_cuda:  # the fused kernels there need multiples of 8
        width = -(-width // 8) * 8
    q, k, v = (F.pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=1.0)
    return mixed[..., :d_v]


def _attend_blocks(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    batch, heads, length, _ = q.shape
    groups, d_v = k.shape[1], v.shape[-1]
    # The heads of one group stand together, as more queries of the same keys.
    q = q.unflatten(1, (groups, heads // groups))
    k = k.transpose(2, 3)
    mixed = q.new_empty(batch, groups, heads // groups, length, d_v)
    # Adding this is faster than filling with a mask.
    ahead = torch.full((BLOCK, BLOCK), -math.inf, dtype=q.dtype, device=q.device).triu_(1)
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        seen = stop if causal else k.shape[3]
        scores = q[:, :, :, start:stop].flatten(2, 3) @ k[..., :seen]
        scores = scores.unflatten(2, (heads // groups, stop - start))
        if causal:
            scores[..., start:stop] += ahead[: stop - start, : stop - start]
        if mask is not None:
            rows = mask if mask.shape[2] == 1 else mask[:, :, start:stop]
            scores = scores.masked_fill(~rows[:, :, None], -math.inf)
        share = scores.softmax(-1).flatten(2, 3) @ v[:, :, :seen]
        mixed[:, :, :, start:stop] = share.unflatten(2, (heads // groups, stop - start))
    return mixed.flatten(1, 2)
