"""Embedding, attention, SwiGLU and classifier at inference, folded from a trained model's parts.

Holds buffers alone: nothing here trains. Shapes: N = B*S tokens, D sites, H query heads, G
key/value heads, P pairs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso.inference.attention import AttentionForm, attend, fits_narrow
from gaugelasso.inference.cache import CacheRows
from gaugelasso.inference.folding import Folding, Form, StreamOrder, widened
from gaugelasso.inference.stream import uses_kernels
from gaugelasso.kernels.dispatch import aligned
from gaugelasso.models import layers, operators


class Embedding(nn.Module):
    """Tokens [B, S] or patches [B, S, n] -> the stream [N, D].

    The scale is folded into table and positions, and both are as wide as the stream: a look-up
    writes the whole of it at once.
    """

    table: Tensor
    positions: Tensor | None

    def __init__(self, part: layers.Embedding, folding: Folding, order: StreamOrder = "tokens"):
        super().__init__()
        self.tokens, self.order = part.tokens, order
        positions = None
        if part.positions is not None:
            positions = folding.spread(part.positions, part.write).contiguous()
        self.register_buffer("table", folding.spread(part.table, part.write).contiguous())
        self.register_buffer("positions", positions)

    def forward(self, inputs: Tensor, at: Tensor | None = None) -> Tensor:
        """`at` [B, S] are the positions; without them they count from 0."""
        if self.tokens:
            x = F.embedding(inputs, self.table)
        else:
            x = inputs.to(self.table.dtype) @ self.table
        if self.positions is not None:
            x = x + (self.positions[: inputs.shape[1]] if at is None else self.positions[at])
        x = x.flatten(0, 1)
        return x if self.order == "tokens" else x.T.contiguous().T


class Attention(nn.Module):
    """Multi-head attention with grouped keys, as `models.operators.Attention`."""

    cos: Tensor | None
    sin: Tensor | None

    def __init__(self, part: operators.Attention, folding: Folding, form: Form, length: int):
        super().__init__()
        self.form = form
        self.heads, self.groups = part.query.shape[1], part.key.shape[1]
        self.d_k, self.d_v = part.query[0, 0].numel(), part.value.shape[2]
        self.align = folding.align
        self.wide_k, self.wide_v = self.widths(form.attention)
        # The softmax scale in the queries' map is exact: the rotation after it is linear.
        queries, keys = (part.query * part.softmax_scale).flatten(2), part.key.flatten(2)
        maps = [widened(each, 2, self.wide_k) for each in (queries, keys)]
        maps.append(widened(part.value, 2, self.wide_v))
        self.features = sum(each[0].numel() for each in maps)
        if missing := folding.wide(self.features) - self.features:
            maps.append(queries.new_zeros(len(queries), missing))
        self.read = folding.read(part.read, maps, form.read)
        out = widened(part.out, 1, self.wide_v).flatten(0, 1)
        self.write = folding.write(part.write, out, form.write)
        cos = sin = None
        if part.rope:  # of all positions: a step must not compute angles
            frequencies = part.frequencies.cpu()
            angles = torch.arange(length, dtype=frequencies.dtype)[:, None] * frequencies
            cos, sin = angles.cos().to(folding.dtype), angles.sin().to(folding.dtype)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def widths(self, form: AttentionForm) -> tuple[int, int]:
        """d_k and d_v; where widths are padded, multiples of 8, and equal ones for SDPA."""
        if self.align == 1:
            return self.d_k, self.d_v
        keys, values = aligned(self.d_k), aligned(self.d_v)
        if form == "narrow" and fits_narrow(keys, values):
            return keys, values
        return (max(keys, values),) * 2

    def split(
        self,
        rows: Tensor,
        batch: int,
        at: Tensor | None = None,
        cache: CacheRows | None = None,
        cached_only: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the read gives -> q [B, H, S, d_k], k [B, G, S, d_k] and v [B, G, S, d_v].

        `at` are the positions, as in `Embedding`. Heads are padded with zeros, as `wide_k` and
        `wide_v` say. New keys and values are also stored in the `cache`, and need not be returned
        if `cached_only`.
        """
        if uses_kernels(rows):
            from gaugelasso.kernels.gpu import decoding

            angles = None if self.cos is None or self.sin is None else (self.cos, self.sin)
            return decoding.split_heads(
                rows, batch, (self.heads, self.groups), (self.d_k, self.d_v),
                (self.wide_k, self.wide_v), angles, at,
                None if cache is None else (cache.keys, cache.values),
                None if cache is None else cache.slots, cached_only,
            )  # fmt: skip
        q, k, v = self._split(rows.unflatten(0, (batch, -1)), at)
        if cache is not None:
            cache.store_(k[..., : self.d_k], v[..., : self.d_v], at)
        return q, k, v

    def _split(self, rows: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        widths = [(self.heads + self.groups) * self.wide_k, self.groups * self.wide_v]
        qk, v = rows[..., : self.features].split(widths, dim=2)
        v = v.unflatten(2, (self.groups, self.wide_v)).transpose(1, 2)
        qk = qk.unflatten(2, (self.heads + self.groups, self.wide_k)).transpose(1, 2)
        if self.cos is not None and self.sin is not None:
            if at is None:
                cos, sin = self.cos[: rows.shape[1]], self.sin[: rows.shape[1]]
            else:
                cos, sin = self.cos[at][:, None], self.sin[at][:, None]
            first, second = qk[..., : self.d_k].chunk(2, dim=-1)
            turned = [first * cos - second * sin, first * sin + second * cos]
            padding = [qk[..., self.d_k :]] if self.wide_k > self.d_k else []
            qk = torch.cat(turned + padding, dim=-1)
        q, k = qk.split([self.heads, self.groups], dim=1)
        return q, k, v

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> Tensor:
        return attend(q, k, v, causal=causal, mask=mask, form=self.form.attention)

    def deliver(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The stream plus the output map of the heads' results [B, H, S, d_v]."""
        return self.write(x, _merged(mixed))

    def mix(
        self,
        rows: Tensor,
        batch: int,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        cache: CacheRows | None = None,
    ) -> Tensor:
        """What the read gives for whole sequences [N, features] -> what is written [N, H d_v].

        Keys and values are also stored in the `cache`.
        """
        q, k, v = self.split(rows, batch, cache=cache)
        return _merged(attend(q, k, v, causal=causal, mask=mask, form=self.form.attention))

    def mix_one(
        self, rows: Tensor, cache: CacheRows, positions: Tensor, seen: int, mask: Tensor | None
    ) -> Tensor:
        """As `mix`, for one token of every sequence [B, features], at `positions` [B] of the cache.

        `mask` is of the first `seen` positions, which contain all of them; the kernel needs none.
        """
        q, *_ = self.split(rows, len(rows), positions[:, None], cache, cached_only=True)
        if uses_kernels(q):
            from gaugelasso.kernels.gpu import decoding

            one = decoding.attend_one(q, cache.keys, cache.values, positions, self.wide_v)
            return _merged(one)
        seen_by = (each[:, :, :seen] for each in (cache.keys, cache.values))
        mixed = self.attend(q[..., : self.d_k], *seen_by, mask=mask)
        return _merged(widened(mixed, 3, self.wide_v))


class Mlp(nn.Module):
    """down(up(y) silu(gate(y)))."""

    def __init__(self, part: operators.SwiGLU, folding: Folding, form: Form):
        super().__init__()
        self.form = form
        maps = [folding.widened(each, 1) for each in (part.up, part.gate)]
        self.read = folding.read(part.read, maps, form.read)
        self.write = folding.write(part.write, folding.widened(part.down, 0), form.write)

    def forward(self, x: Tensor) -> Tensor:
        return self.write(x, self.read(x, gated=True))


class Classifier(nn.Module):
    """[N, D] -> [N, outputs]."""

    def __init__(self, part: layers.Classifier, folding: Folding, form: Form):
        super().__init__()
        self.outputs = part.out.shape[1]
        self.read = folding.read(part.read, [folding.widened(part.out, 1)], form.read)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x)[:, : self.outputs]


def _merged(mixed: Tensor) -> Tensor:
    """[B, H, S, d] -> [N, H d]."""
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


Reader = Attention | Mlp | Classifier
