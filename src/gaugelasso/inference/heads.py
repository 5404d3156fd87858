"""Attention at inference, folded from a trained operator.

Shapes: N = B*S tokens, D sites, H query heads, G key/value heads, P pairs.
"""

import torch
from torch import Tensor, nn

from gaugelasso.inference.attention import (
    ROWS,
    AttentionForm,
    attend,
    attend_one,
    fits_rows,
    rotate_,
    rotated,
)
from gaugelasso.inference.cache import CacheRows, NewTokens
from gaugelasso.inference.folding import Folding, Form, counters, in_one_kernel, widened
from gaugelasso.inference.head_norm import HeadNorm
from gaugelasso.inference.stream import uses_kernels
from gaugelasso.kernels.dispatch import aligned
from gaugelasso.kernels.tiles import DECODING, Tile
from gaugelasso.models import operators


class Attention(nn.Module):
    """Multi-head attention with grouped keys, as `models.operators.Attention`.

    Where it has norms of queries and keys, no form of a step is one kernel. A window that a query
    can see the end of is left to PyTorch: the kernels have none.
    """

    bias: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    counters: Tensor

    def __init__(self, part: operators.Attention, folding: Folding, form: Form, length: int):
        super().__init__()
        self.form = form
        self.heads, self.groups = part.query.shape[1], part.key.shape[1]
        self.d_k, self.d_v = part.query[0, 0].numel(), part.value.shape[2]
        self.align, self.dtype = folding.align, folding.dtype
        self.rope = part.rope
        self.window = part.window if part.window is not None and part.window < length else None
        self.wide_k, self.wide_v = self.widths(form.attention)
        # Channels from the first half of a rotated head to the second.
        padded = self._halves_padded(form.attention)
        self.second = (self.wide_k if padded else self.d_k) // 2
        leaves: list[Tensor] = [part.query, part.key, part.value]
        if part.has_bias:  # padded as its map is: until then it is one more row of it
            biases = zip(leaves, part.biases(), strict=True)
            leaves = [torch.cat([leaf, bias[None]]) for leaf, bias in biases]
        query, key, value = leaves
        # The softmax scale in the queries' map is exact: the rotation after it is linear. A norm is
        # not: it has the scale in its gain.
        norms = list(part.head_norms().values())
        scale = 1.0 if norms else part.softmax_scale
        maps = [self._wide_keys(each) for each in (query * scale, key)]
        maps.append(widened(value, 2, self.wide_v))
        self.features = sum(each[0].numel() for each in maps)
        if missing := folding.wide(self.features) - self.features:
            maps.append(value.new_zeros(len(value), missing))
        bias = None
        if part.has_bias:
            last = torch.cat([each[-1].flatten() for each in maps])
            maps, bias = [each[:-1] for each in maps], last.detach().cpu().to(folding.dtype)
        self.register_buffer("bias", bias)
        self.norm: HeadNorm | None = None
        if norms:
            # As one head of one input each, padded as the maps are.
            scales = (part.softmax_scale, 1.0)
            gains = [norm.gains * each for norm, each in zip(norms, scales, strict=True)]
            values = (gains, [norm.weights for norm in norms])
            gain, weight = (
                torch.cat([self._wide_keys(each[None, None])[0] for each in both])
                for both in values
            )
            sizes = (self.heads, self.groups, norms[0].eps)
            self.norm = HeadNorm(gain, weight, *sizes, folding.dtype)
        self.read = folding.read(part.read, maps, form)
        out = widened(part.out, 1, self.wide_v).flatten(0, 1)
        self.write = folding.write(part.write, out, form)
        cos = sin = None
        if self.rope:  # of all positions: a step must not compute angles
            frequencies = part.frequencies.cpu()
            angles = torch.arange(length, dtype=frequencies.dtype)[:, None] * frequencies
            cos, sin = (
                widened(each, 1, self.second).to(folding.dtype)
                for each in (angles.cos(), angles.sin())
            )
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.register_buffer("counters", counters(), persistent=False)

    def widths(self, form: AttentionForm) -> tuple[int, int]:
        """Of keys and values: where widths are padded, multiples of 8, and equal ones for SDPA."""
        if self.align == 1:
            return self.d_k, self.d_v
        keys, values = aligned(self.d_k), aligned(self.d_v)
        if self._halves_padded(form):
            return 2 * aligned(self.d_k // 2), values
        if form in ROWS and fits_rows((keys, values), self.dtype):
            return keys, values
        return (max(keys, values),) * 2

    def _halves_padded(self, form: AttentionForm) -> bool:
        """Whether each half of a head is padded, for a kernel that rotates what it reads."""
        wide = 2 * aligned(self.d_k // 2), aligned(self.d_v)
        return form == "direct" and self.rope and self.align > 1 and fits_rows(wide, self.dtype)

    def _wide_keys(self, heads: Tensor) -> Tensor:
        """A map [d, H, 2, P] or [d, H, d_k] of queries or keys -> [d, H, wide_k]."""
        halves = widened(heads, 3, self.second) if self.rope else heads
        return widened(halves.flatten(2), 2, self.wide_k)

    @property
    def angles(self) -> tuple[Tensor, Tensor] | None:
        return None if self.cos is None or self.sin is None else (self.cos, self.sin)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of a stream [N, D], before they are rotated."""
        rows: Tensor = self.read(x)
        rows = rows if self.bias is None else rows + self.bias
        return rows if self.norm is None else self.norm(rows)

    def real_keys(self, heads: Tensor) -> Tensor:
        """Queries or keys without padding: [..., d_k]."""
        pairs = self.d_k // 2
        if self.second == pairs or not self.rope:
            return heads[..., : self.d_k]
        halves = heads[..., :pairs], heads[..., self.second : self.second + pairs]
        return torch.cat(halves, dim=-1)

    def split(
        self,
        rows: Tensor,
        batch: int,
        at: Tensor | None = None,
        cache: CacheRows | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `project` gives -> q [B, H, S, d_k], k [B, G, S, d_k] and v [B, G, S, d_v].

        `at` are the positions, as in `Embedding`. Heads are padded with zeros, as `wide_k` and
        `wide_v` say. New keys and values are also stored in the `cache`. The rows may be changed.
        """
        kernels, turned = uses_kernels(rows), self.heads + self.groups
        if kernels:
            self._rotate_(rows, batch, at, cache)
        rows = rows[:, : self.features].unflatten(0, (batch, -1))
        heads, v = rows.split([turned * self.wide_k, self.groups * self.wide_v], dim=2)
        heads, v = heads.unflatten(2, (turned, -1)), v.unflatten(2, (self.groups, -1))
        if not kernels:
            heads = self._turned(heads, slice(rows.shape[1]) if at is None else at)
        q, k = heads.split([self.heads, self.groups], dim=2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if kernels:
            # Attention needs aligned addresses.
            return (q, k, v) if self.align % 8 == 0 else tuple(e.contiguous() for e in (q, k, v))
        if cache is not None:
            cache.store_(self.real_keys(k), v[..., : self.d_v])
        return q, k, v

    def _rotate_(
        self, rows: Tensor, batch: int, at: Tensor | None, cache: CacheRows | None
    ) -> None:
        from gaugelasso.kernels.gpu import mixing

        mixing.rotate_heads_(
            rows, batch, (self.heads, self.groups), (self.d_k, self.d_v),
            (self.wide_k, self.wide_v), self.second, self.angles, at,
            None if cache is None else (cache.keys, cache.values),
            None if cache is None else cache.slots,
        )  # fmt: skip

    def _turned(self, heads: Tensor, where: Tensor | slice | int) -> Tensor:
        """Queries and keys [..., H + G, wide_k], rotated by the angles of positions.

        In place, except in a trace, which others will run.
        """
        if self.cos is None or self.sin is None:
            return heads
        angles = self.cos[where].unsqueeze(-2), self.sin[where].unsqueeze(-2)
        if torch.compiler.is_compiling():
            return rotated(heads, *angles)
        rotate_(heads, *angles)
        return heads

    def step(self, x: Tensor, cache: CacheRows, at: NewTokens) -> Tensor:
        """The stream [B, D] after one token of every sequence; the rest as in `mix_one`."""
        # The one kernel has no biases, norms of heads or window.
        more = self.norm is not None or self._ends(at.seen)
        more = more or self.bias is not None or self.write.bias is not None
        if more or not in_one_kernel(self.form, x):
            return self.write(x, self.mix_one(self.project(x), cache, at))
        from gaugelasso.kernels.gpu import whole

        return whole.attention_(
            x, self.read.parts(), self.write.parts(), self.counters, self.read.eps,
            (cache.keys, cache.values), at.positions, self.heads, (self.wide_k, self.wide_v),
            self.second, self.angles,
        )  # fmt: skip

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
        # Always a copy: whether a view would do depends on the length, which an export leaves open.
        heads = widened(mixed, 3, self.wide_v).transpose(1, 2)
        heads = heads.clone(memory_format=torch.contiguous_format)
        return self.write(x, heads.flatten(2).flatten(0, 1))

    def mix(
        self,
        rows: Tensor,
        batch: int,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        cache: CacheRows | None = None,
        tile: Tile | None = None,
    ) -> Tensor:
        """What `project` gives for whole sequences [N, features] -> what is written [N, H d_v].

        Keys and values are also stored in the `cache`. The rows may be changed.
        """
        form = self.form.attention
        if form in ROWS and mask is None and uses_kernels(rows) and self._fits_rows(rows, batch):
            from gaugelasso.kernels.gpu import mixing

            turning = cache is None and self._halves_padded(form)
            if not turning:
                self._rotate_(rows, batch, None, cache)
            return mixing.attend_rows(
                rows, batch, (self.heads, self.groups), (self.wide_k, self.wide_v),
                self.angles if turning else None, causal, tile or self._tile(step=False),
            )  # fmt: skip
        q, k, v = self.split(rows, batch, cache=cache)
        mixed = attend(q, k, v, causal=causal, mask=mask, form=form, window=self.window)
        return _merged(mixed)

    def _tile(self, step: bool) -> Tile | None:
        """The tile that was measured, if it was for steps of decoding, or for sequences."""
        tile = self.form.attention_tile
        return tile if (tile in DECODING) == step else None

    def _fits_rows(self, rows: Tensor, batch: int) -> bool:
        wide = self.align % 8 == 0 and fits_rows((self.wide_k, self.wide_v), self.dtype)
        return wide and not self._ends(len(rows) // batch)

    def _ends(self, keys: int) -> bool:
        """Whether there is a window that is shorter than so many keys."""
        return self.window is not None and self.window < keys

    def mix_one(
        self, rows: Tensor, cache: CacheRows, at: NewTokens, tile: Tile | None = None
    ) -> Tensor:
        """As `mix`, for one token of every sequence [B, features]."""
        if uses_kernels(rows) and not self._ends(at.seen):
            from gaugelasso.kernels.gpu import decoding

            return decoding.attend_one(
                rows, cache.keys, cache.values, at.positions, self.heads,
                (self.wide_k, self.wide_v), self.second, self.angles,
                tile or self._tile(step=True),
            )  # fmt: skip
        # Few operations: on a CPU each of them costs more than its work.
        turned = self.heads + self.groups
        heads, v = rows[:, : self.features].split(
            [turned * self.wide_k, self.groups * self.wide_v], dim=1
        )
        heads, v = heads.unflatten(1, (turned, -1)), v.unflatten(1, (self.groups, -1))
        heads = self._turned(heads, at.positions if at.equal is None else at.equal)
        q, k = self.real_keys(heads).split([self.heads, self.groups], dim=1)
        cache.store_one_(k, v[..., : self.d_v], at)
        first, mask = 0, at.mask
        if self.window is not None and at.equal is not None:
            first = max(0, at.seen - self.window)
        elif self.window is not None:
            back = at.positions[:, None] - torch.arange(at.seen, device=rows.device)
            mask = ((back >= 0) & (back < self.window))[:, None, None]
        keys, values = (each[:, :, first : at.seen] for each in (cache.keys, cache.values))
        mixed = attend_one(q, keys, values, mask, self.form.attention)
        return widened(mixed, 2, self.wide_v).flatten(1)


def _merged(mixed: Tensor) -> Tensor:
    """[B, H, S, d] -> [N, H d]."""
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)
