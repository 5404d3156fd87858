"""The residual stream [D, N]: embedding of tokens, reads and writes of sites."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.kernels.dispatch import aligned, check_offsets, fused, work_dtype

# A token with a mean square below this has no signal to normalise. Streams do not get that small.
EPS = 1e-20


def embed(
    tokens: Tensor, table: Tensor, positions: Tensor | None, scale: Tensor, sites: Tensor, size: int
) -> Tensor:
    """A stream of `size` sites with x[t_j, n] = scale_j (table[token_n, j] + positions[n, j])."""
    if positions is not None and len(positions) < tokens.shape[1]:
        raise UserError(
            f"a sequence of {tokens.shape[1]} tokens is longer than the {len(positions)} learned "
            "positions of the model; shorten it"
        )
    if fused(table):
        from gaugelasso.kernels.gpu import stream

        return stream.Embed.apply(tokens, table, positions, scale, sites, size, work_dtype(table))
    rows = _look_up(table, tokens.reshape(-1))
    if positions is not None:
        length = tokens.shape[1]
        rows = (rows.view(-1, length, rows.shape[1]) + positions[:length]).flatten(0, 1)
    x = torch.zeros(size, rows.shape[0], device=table.device, dtype=table.dtype)
    return write(x, sites, scale[:, None] * rows.T)


def _look_up(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of a table. The two branches differ in their backward pass alone."""
    if table.is_cuda:
        return table.index_select(0, tokens)  # backward does not sort: safe in a CUDA graph
    return F.embedding(tokens, table)  # on a CPU, index_select's backward adds row by row


def read(
    x: Tensor,
    sites: Tensor,
    weight: Tensor,
    energy: Tensor | None,
    eps: float = 0.0,
    by_token: bool = False,
) -> tuple[Tensor, Tensor]:
    """The stream, and n_j = x[s_j] / sqrt(eps + sum_i weight_i x[s_i]^2); 0 without signal.

    Callers must continue with the returned stream: the fused backward pass adds to its
    gradient in place. `energy`, if given, receives the mean squares of x[s_j], or with `by_token`
    those of n_j, in which every token counts alike.
    """
    if fused(x) and not weight.requires_grad:
        from gaugelasso.kernels.gpu import stream

        check_offsets(aligned(len(sites)), x.shape[1])
        record = energy, by_token
        x, normalised = stream.Read.apply(x, weight, sites, *record, eps, EPS, work_dtype(x))
        return x, normalised
    picked = x.index_select(0, sites)
    square = picked.square()
    level = (weight[:, None] * square).sum(dim=0)
    if eps:
        level = level + eps
    # No gradient for tokens without signal: a product of several 1 / sqrt(EPS) overflows.
    factor = torch.where(level > EPS, level.clamp(min=EPS).rsqrt(), 0.0)
    if energy is not None:
        counted = square.detach()
        if by_token:
            counted = counted * factor.detach().square()
        energy.copy_(counted.mean(dim=1))
    return x, picked * factor


def write(x: Tensor, sites: Tensor, u: Tensor) -> Tensor:
    """x[t_j] += u_j, in place: no backward pass needs the values of the stream."""
    if fused(x):
        from gaugelasso.kernels.gpu import stream

        check_offsets(*u.shape)
        return stream.Write.apply(x, sites, u)
    return x.index_add_(0, sites, u.to(x.dtype))
