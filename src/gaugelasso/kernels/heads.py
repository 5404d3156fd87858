"""Attention heads: from projected rows to rotated heads, attention itself, and back to rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso.kernels.dispatch import aligned, check_offsets, fused
from gaugelasso.kernels.stream import EPS

# Largest padded head width of the fused attention here. For wider heads and long sequences,
# PyTorch's attention is faster.
NARROW = 32


def split_heads(
    rows: Tensor,
    batch: int,
    heads: int,
    groups: int,
    d_k: int,
    d_v: int,
    frequencies: Tensor | None,
    start: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, heads, S, d_k], k [B, groups, S, d_k], v [B, groups, S, d_v] from [features, N].

    Features come as `heads` queries, `groups` keys, `groups` values. With `frequencies` [P] the
    d_k = 2 P features of a head are P first halves, then P second halves of pairs, and pair
    p at position t is rotated by t f_p; the first position is `start`. In fused form, features
    and heads are padded with zeros to multiples of `dispatch.ALIGN`, the two halves of a pair
    are adjacent, and `start` must be 0.
    """
    if fused(rows):
        assert start == 0, "the fused form has no start position"
        from gaugelasso.kernels.gpu.heads import SplitHeads

        check_offsets((heads + groups) * aligned(d_k) + groups * aligned(d_v), rows.shape[1])
        q, k, v = SplitHeads.apply(rows, batch, heads, groups, d_k, d_v, frequencies)
        return q, k, v
    rows = rows.view(rows.shape[0], batch, -1)
    qk, v = rows.split([(heads + groups) * d_k, groups * d_v])
    if frequencies is not None:
        qk = rotate(qk.unflatten(0, (heads + groups, 2, -1)), frequencies, start)
    qk = qk.reshape(heads + groups, d_k, *qk.shape[-2:])
    q, k = qk.split([heads, groups])
    v = v.unflatten(0, (groups, d_v))
    # [heads, d, B, S] -> [B, heads, S, d]
    q, k, v = (t.permute(2, 0, 3, 1) for t in (q, k, v))
    return q, k, v


def rotate(x: Tensor, frequencies: Tensor, start: int = 0) -> Tensor:
    """RoPE: rotate pair p at position t by t f_p, t from `start` on. x [heads, 2, P, B, S]."""
    positions = torch.arange(x.shape[-1], device=x.device, dtype=frequencies.dtype) + start
    angle = (frequencies[:, None] * positions)[:, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.unbind(1)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=1)


def normalise_heads(
    rows: Tensor,
    gain: Tensor,
    weight: Tensor,
    energy: Tensor | None,
    eps: float,
    by_token: bool,
) -> Tensor:
    """gain_sp z_sp / sqrt(eps + sum_p weight_p mean_s z_sp^2) in each head; 0 without signal.

    Rows [heads * d_k, N]; gain [2, P] or [P], the channels of a head; weight [P]. `energy` [P], if
    given, receives the mean of z_sp^2 over s, heads and tokens, or with `by_token` that of the
    normalised z. There is no fused form.
    """
    heads = rows.unflatten(0, (-1, *gain.shape))
    square = heads.to(torch.promote_types(rows.dtype, torch.float32)).square()
    if gain.ndim > 1:
        square = square.mean(1)
    level = (weight[:, None] * square).sum(1, keepdim=True) + eps
    factor = torch.where(level > EPS, level.clamp(min=EPS).rsqrt(), 0.0)
    if energy is not None:
        counted = square.detach()
        if by_token:
            counted = counted * factor.detach().square()
        energy.copy_(counted.mean(dim=(0, 2)))
    if gain.ndim > 1:
        factor = factor[:, None]
    return (heads * (factor * gain[..., None])).to(rows.dtype).flatten(0, -2)


def band(length: int, window: int, device: torch.device) -> Tensor:
    """[S, S], True where a query sees a key: its own and those before it, `window` in all."""
    key = torch.arange(length, device=device)
    query = key[:, None]
    return (key <= query) & (key > query - window)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: int | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v over [B, heads, S, d], with d_k and d_v of any size.

    With `window`, which needs `causal`, a query sees that many keys at most, up to its own. With
    `lengths` [B], which is for attention that is not causal, it sees the first so many keys of its
    sequence. The result may be wider than v; the additional channels are zero.
    """
    mask = None
    if lengths is not None:
        positions = torch.arange(k.shape[2], device=k.device)
        mask = (positions < lengths[:, None])[:, None, None]
    assert lengths is None or window is None
    if window is not None and window < q.shape[2]:  # no fused form of it here
        mask = band(q.shape[2], window, q.device)
    if mask is None and fused(q) and scale > 0 and max(q.shape[-1], v.shape[-1]) <= NARROW:
        from gaugelasso.kernels.gpu.attention import Attend

        batch, heads, length, _ = q.shape
        check_offsets(heads * max(q.shape[-1], v.shape[-1]), batch * length)
        mixed: Tensor = Attend.apply(q, k, v, scale, causal)
        return mixed
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if not fused(q):
        # PyTorch's fused attention needs equal, contiguous widths, on a GPU in multiples of 8.
        # Additional zero channels change no result.
        width = max(q.shape[-1], v.shape[-1])
        if q.is_cuda:
            width = aligned(width)
        q, k, v = (_packed(F.pad(t, (0, width - t.shape[-1]))) for t in (q, k, v))
    causal = causal and mask is None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)


def _packed(x: Tensor) -> Tensor:
    """Contiguous, with the default strides of its shape.

    `contiguous` keeps the stride of a dim of size 1, and PyTorch's attention on a GPU rejects
    an odd stride.
    """
    return x.contiguous().view(-1).view(x.shape)


def merge_heads(mixed: Tensor, out: Tensor, scale: Tensor) -> Tensor:
    """(out scale)^T mixed: mixed [B, heads, S, >= d_v], out [heads, d_v, d] -> [d, N]."""
    if fused(mixed):
        from gaugelasso.kernels.gpu.maps import Deliver

        # Token-major, as attention wrote it; padded channels are multiplied by rows of zeros.
        rows = mixed.transpose(1, 2).flatten(2).flatten(0, 1).T
        return Deliver.apply(rows, out.flatten(0, 1), scale, out.shape[1], mixed.shape[3])
    rows = mixed[..., : out.shape[1]].permute(1, 3, 0, 2).reshape(out.shape[:2].numel(), -1)
    return (out.flatten(0, 1) * scale).T @ rows
