"""Embedding, attention, SwiGLU and classifier at inference, folded from a trained model's parts.

Holds buffers alone: nothing here trains. Shapes: N = B*S tokens, D sites, H query heads, G
key/value heads, P pairs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso.inference.attention import AttentionForm, attend
from gaugelasso.inference.stream import Read, ReadForm, Write, WriteForm, placed, statistics_dtype
from gaugelasso.models import layers, operators


@dataclass(frozen=True)
class Form:
    """How one operator reads, writes and attends. All forms compute the same."""

    read: ReadForm = "gather"
    write: WriteForm = "scatter"
    attention: AttentionForm = "sdpa"


class Folding(NamedTuple):
    """What all parts of a model are folded with: the place of each site, and the precision."""

    place: Tensor
    dtype: torch.dtype
    int8: bool = False

    def read(self, part: layers.Extractor, maps: list[Tensor], form: ReadForm) -> Read:
        sites, order = self.place[part.sites.cpu()].sort()
        gain = part.gain.detach().cpu()
        # Without slow weights the paper's, which depend on the gain alone: computed once.
        weight = gain.square() / gain.square().sum() if part.tied else part.weight.cpu()
        joined = torch.cat([each.detach().cpu().flatten(1) for each in maps], 1)
        folded = (gain[:, None] * joined)[order].to(self.dtype)
        weight = weight[order].to(statistics_dtype(self.dtype))
        return Read(sites, weight, folded, form, self.int8)

    def write(self, part: layers.Injector, maps: Tensor, form: WriteForm) -> Write:
        sites, order = self.place[part.sites.cpu()].sort()
        scale = part.scale.detach().cpu()
        folded = (maps.detach().cpu() * scale)[:, order].to(self.dtype)
        return Write(sites, folded, len(self.place), form, self.int8)

    def spread(self, rows: Tensor, part: layers.Injector) -> Tensor:
        """Rows [n, d] that are added to sites -> rows [n, D] of the stream."""
        columns = (rows.detach().cpu() * part.scale.detach().cpu()).T
        return placed(columns, self.place[part.sites.cpu()], len(self.place)).T.to(self.dtype)


class Embedding(nn.Module):
    """Tokens [B, S] or patches [B, S, n] -> the stream [N, D].

    The scale is folded into table and positions, and both are as wide as the stream: a look-up
    writes the whole of it at once.
    """

    table: Tensor
    positions: Tensor | None

    def __init__(self, part: layers.Embedding, folding: Folding):
        super().__init__()
        self.tokens = part.tokens
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
        return x.flatten(0, 1)


class Attention(nn.Module):
    """Multi-head attention with grouped keys, as `models.operators.Attention`."""

    cos: Tensor | None
    sin: Tensor | None

    def __init__(self, part: operators.Attention, folding: Folding, form: Form, length: int):
        super().__init__()
        self.form = form
        self.heads, self.groups = part.query.shape[1], part.key.shape[1]
        self.d_k, self.d_v = part.query[0, 0].numel(), part.value.shape[2]
        # The softmax scale in the queries' map is exact: the rotation after it is linear.
        maps: list[Tensor] = [part.query * part.softmax_scale, part.key, part.value]
        self.read = folding.read(part.read, maps, form.read)
        self.write = folding.write(part.write, part.out.flatten(0, 1), form.write)
        cos = sin = None
        if part.rope:  # of all positions: a step must not compute angles
            frequencies = part.frequencies.cpu()
            angles = torch.arange(length, dtype=frequencies.dtype)[:, None] * frequencies
            cos, sin = angles.cos().to(folding.dtype), angles.sin().to(folding.dtype)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def project(
        self, x: Tensor, batch: int, at: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, S, d_k], k [B, G, S, d_k] and v [B, G, S, d_v]; positions as in `Embedding`."""
        rows = self.read(x).unflatten(0, (batch, -1))
        widths = [(self.heads + self.groups) * self.d_k, self.groups * self.d_v]
        qk, v = rows.split(widths, dim=2)
        v = v.unflatten(2, (self.groups, self.d_v)).transpose(1, 2)
        qk = qk.unflatten(2, (self.heads + self.groups, self.d_k)).transpose(1, 2)
        if self.cos is not None and self.sin is not None:
            if at is None:
                cos, sin = self.cos[: rows.shape[1]], self.sin[: rows.shape[1]]
            else:
                cos, sin = self.cos[at][:, None], self.sin[at][:, None]
            first, second = qk.chunk(2, dim=-1)
            qk = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
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
        return self.write(x, mixed.transpose(1, 2).flatten(2).flatten(0, 1))


class Mlp(nn.Module):
    """down(up(y) silu(gate(y)))."""

    def __init__(self, part: operators.SwiGLU, folding: Folding, form: Form):
        super().__init__()
        self.form = form
        self.read = folding.read(part.read, [part.up, part.gate], form.read)
        self.write = folding.write(part.write, part.down, form.write)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.read(x).chunk(2, dim=1)
        return self.write(x, F.silu(gate) * up)


class Classifier(nn.Module):
    """[N, D] -> [N, outputs]."""

    def __init__(self, part: layers.Classifier, folding: Folding, form: Form):
        super().__init__()
        self.read = folding.read(part.read, [part.out], form.read)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x)


Reader = Attention | Mlp | Classifier
