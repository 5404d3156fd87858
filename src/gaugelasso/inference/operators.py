"""Embedding, MLPs and classifier at inference, folded from a trained model's parts.

Holds buffers alone: nothing here trains. Shapes: N = B*S tokens, D sites.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso.inference.folding import Folding, Form, StreamOrder, counters, in_one_kernel
from gaugelasso.inference.heads import Attention
from gaugelasso.inference.norms import Norm
from gaugelasso.inference.stream import Matrix, uses_kernels
from gaugelasso.kernels.tiles import FEW, MOST_READ, MOST_WRITTEN
from gaugelasso.models import gelu, heads, hidden_head, layers, operators


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
        if self.tokens and uses_kernels(self.table):
            from gaugelasso.kernels.gpu import ends

            return ends.embed(inputs, self.table, self.positions, at, self.order == "sites")
        if self.tokens:
            x = F.embedding(inputs, self.table)
        else:
            x = inputs.to(self.table.dtype) @ self.table
        if self.positions is not None:
            x = x + (self.positions[: inputs.shape[1]] if at is None else self.positions[at])
        x = x.flatten(0, 1)
        return x if self.order == "tokens" else x.T.contiguous().T


class Mlp(nn.Module):
    """down(up(y) silu(gate(y)))."""

    counters: Tensor

    def __init__(self, part: operators.SwiGLU, folding: Folding, form: Form):
        super().__init__()
        self.form = form
        maps = [folding.widened(each, 1) for each in (part.up, part.gate)]
        # One kernel for the whole MLP reads the halves.
        paired = form.read == "staged_gated" and form.step == "parts" and form.joined is None
        self.read = folding.read(part.read, maps, form, paired)
        self.write = folding.write(part.write, folding.widened(part.down, 0), form)
        self.register_buffer("counters", counters(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self._is_plain and in_one_kernel(self.form, x):
            from gaugelasso.kernels.gpu import whole

            read, write = self.read.parts(), self.write.parts()
            return whole.mlp_(x, read, write, self.counters, self.read.eps)
        tile = self.form.joined
        if tile is not None and self.form.write == "fused" and self.joins(x):
            from gaugelasso.kernels.gpu import mlp

            firsts = (self.read.first, self.write.first)
            read, write = self.read.parts(), self.write.parts()
            return mlp.mlp_(x, read, write, self.read.eps, tile, firsts=firsts)
        return self.write(x, self.read(x, gated=True))

    def joins(self, x: Tensor) -> bool:
        """Whether one kernel can compute the whole MLP of these tokens: many, and few sites."""
        few_sites = len(self.read.sites) <= MOST_READ and len(self.write.sites) <= MOST_WRITTEN
        return self._is_plain and few_sites and len(x) > FEW and uses_kernels(x)

    @property
    def _is_plain(self) -> bool:
        """Whether the kernels of a whole MLP can compute it: they normalise, and add no bias."""
        return self.write.bias is None and self.read.weight is not None


class GeluMlp(nn.Module):
    """down(gelu(up(y) + bias)). No form of it is one kernel."""

    bias: Tensor

    def __init__(self, part: gelu.GeluMlp, folding: Folding, form: Form):
        super().__init__()
        self.approximation = part.approximation
        self.read = folding.read(part.read, [folding.widened(part.up, 1)], form)
        self.write = folding.write(part.write, folding.widened(part.down, 0), form)
        bias = folding.widened(part.up_bias.detach().cpu(), 0)
        self.register_buffer("bias", bias.to(folding.dtype, copy=True))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.read(x) + self.bias, approximate=self.approximation)
        return self.write(x, hidden)


class Classifier(nn.Module):
    """[N, D] -> [N, outputs]."""

    bias: Tensor | None

    def __init__(self, part: heads.Classifier, folding: Folding, form: Form):
        super().__init__()
        self.outputs = part.out.shape[1]
        self.read = folding.read(part.read, [folding.widened(self._maps(part), 1)], form)
        bias = None if part.bias is None else part.bias.detach().cpu()
        self.register_buffer("bias", None if bias is None else bias.to(folding.dtype, copy=True))

    @staticmethod
    def _maps(part: heads.Classifier) -> Tensor:
        """What reads the stream."""
        return part.up if isinstance(part, hidden_head.HiddenClassifier) else part.out

    def forward(self, x: Tensor) -> Tensor:
        rows = self.read(x)[:, : self.outputs]
        return rows if self.bias is None else rows + self.bias


class HiddenClassifier(Classifier):
    """[N, D] -> [N, outputs] by a hidden layer with a GELU and a LayerNorm."""

    hidden_bias: Tensor

    def __init__(self, part: hidden_head.HiddenClassifier, folding: Folding, form: Form):
        super().__init__(part, folding, form)
        self.approximation = part.approximation
        hidden_bias = folding.widened(part.up_bias.detach().cpu(), 0)
        self.register_buffer("hidden_bias", hidden_bias.to(folding.dtype, copy=True))
        self.norm = Norm(part.norm, folding)
        out = folding.widened(folding.widened(part.out, 1), 0).detach().cpu()
        self.out = Matrix(out.to(folding.dtype, copy=True), folding.int8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.read(x) + self.hidden_bias, approximate=self.approximation)
        rows = (self.norm(hidden) @ self.out())[:, : self.outputs]
        return rows if self.bias is None else rows + self.bias


Reader = Attention | Mlp | GeluMlp | Classifier
