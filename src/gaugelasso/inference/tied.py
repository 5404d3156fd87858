"""Both ends of a model whose token table is also the map of its classifier, at inference.

The table is stored once. So scales and gains are not folded into it: both ends have their own
factors of its columns. It is a buffer of the embedding, and stays as it is with int8.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso.inference.folding import Folding, StreamOrder
from gaugelasso.inference.stream import normalised, padded, statistics_dtype, uses_kernels
from gaugelasso.models import layers, tied


def column_order(part: layers.Embedding, folding: Folding) -> Tensor:
    """The columns of the table in the order of the sites that they are written to."""
    return folding.place[part.write.sites.cpu()].argsort()


class TiedEmbedding(nn.Module):
    """Tokens [B, S] -> the stream [N, D]: rows of the table, times a scale, at their sites."""

    table: Tensor
    scale: Tensor
    column_of_site: Tensor
    positions: Tensor | None

    def __init__(self, part: layers.Embedding, folding: Folding, order: StreamOrder = "tokens"):
        super().__init__()
        self.order = order
        columns = column_order(part, folding)
        table = folding.widened(part.table.detach().cpu()[:, columns], 1)
        scale = folding.widened(part.write.scale.detach().cpu()[columns], 0)
        # The sites that are not written read one more column, which is zero.
        column_of_site = torch.full((folding.size,), len(scale))
        column_of_site[folding.place[part.write.sites.cpu()][columns]] = torch.arange(len(columns))
        # Zeros at the end of the stream are zeros at the end of the table.
        self.whole = len(columns) == len(folding.place)
        positions = None
        if part.positions is not None:
            positions = folding.spread(part.positions, part.write).contiguous()
        self.register_buffer("table", table.to(folding.dtype).contiguous())
        self.register_buffer("scale", scale.to(folding.dtype))
        self.register_buffer("column_of_site", column_of_site)
        self.register_buffer("positions", positions)

    def forward(self, inputs: Tensor, at: Tensor | None = None) -> Tensor:
        """`at` [B, S] are the positions; without them they count from 0."""
        x = F.embedding(inputs, self.table) * self.scale
        if not self.whole:
            x = F.pad(x, (0, 1)).index_select(-1, self.column_of_site)
        if self.positions is not None:
            x = x + (self.positions[: inputs.shape[1]] if at is None else self.positions[at])
        x = x.flatten(0, 1)
        return x if self.order == "tokens" else x.T.contiguous().T


class TiedClassifier(nn.Module):
    """[N, D] -> [N, outputs], by the table of the embedding. It has one form."""

    sites: Tensor
    weight: Tensor
    gain: Tensor
    bias: Tensor | None
    mean: Tensor | None
    spread: Tensor | None

    def __init__(self, part: tied.TiedClassifier, embedding: layers.Embedding, folding: Folding):
        super().__init__()
        read, columns = part.read, column_order(embedding, folding)
        gain = read.gain.detach().cpu()
        weight = gain.square() / gain.square().sum() if read.tied else read.weight.cpu()
        statistics = statistics_dtype(folding.dtype)
        self.eps = read.eps
        sites = folding.place[read.sites.cpu()][columns]
        self.register_buffer("sites", padded(sites, folding.align))
        self.register_buffer("weight", padded(weight[columns].to(statistics), folding.align))
        self.register_buffer("gain", padded(gain[columns].to(folding.dtype), folding.align))
        for name in ("bias", "mean"):
            given = getattr(part, name)
            kept = None if given is None else given.detach().cpu().to(folding.dtype, copy=True)
            self.register_buffer(name, kept)
        spread = None
        if part.spread is not None:
            spread = padded(part.spread.detach().cpu()[columns].to(folding.dtype), folding.align)
        self.register_buffer("spread", spread)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        if uses_kernels(x):
            from gaugelasso.kernels.gpu import levels

            n = levels.normalised_sites(x, self.sites, self.weight, self.eps, len(self.sites))
        else:
            n = normalised(x.index_select(1, self.sites), self.weight, self.eps)
        read = n * self.gain
        rows = read @ table.T
        if self.mean is not None and self.spread is not None:
            rows = torch.addr(rows, read @ self.spread, self.mean)
        return rows if self.bias is None else rows + self.bias
