"""A token table that is also the classifier's map, and the one axis of its columns.

Column j is written to a site with the scale delta_j of the embedding, and read from a site with
the gain gamma_j of the classifier. Multiply the column by c and divide both factors by c: no
output changes. So the axis has a gauge although the table has two uses, and a cut of an index is
a cut of both.

A LayerNorm removes the mean of what the embedding writes, so its table T is stored with rows of
mean zero. A head that is tied to the table before that also reads the means m (`tied_mean`):

    logits = (T + m s^T) (gamma n) + bias,    s = 1 at first

The spread s is on the axis beside the columns of T, as if it were one more row. The means are not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gaugelasso import kernels
from gaugelasso.axes import Axis, Cost, Operation, Size, Slot
from gaugelasso.models.heads import Head
from gaugelasso.models.layers import Embedding, Extractor, size


class TiedClassifier(Head):
    """The classifier whose map is the transposed table of the embedding; `axis` is its columns'.

    The table is a parameter of the embedding alone, so that every list of tensors has it once.
    """

    def __init__(
        self,
        sites: tuple[int, ...],
        embedding: Embedding,
        *,
        axis: str,
        tied: bool,
        eps: float = 0.0,
        by_token: bool = False,
        bias: bool = False,
        mean: bool = False,
    ):
        norm = Extractor(sites, tied=tied, eps=eps, by_token=by_token)
        super().__init__(norm, len(embedding.table), bias)
        # In a tuple: as an attribute the module would be registered a second time.
        self._embedding = (embedding,)
        self._axis = axis
        self.mean = nn.Parameter(torch.zeros(self.outputs)) if mean else None
        self.spread = nn.Parameter(torch.ones(len(sites))) if mean else None

    @property
    def out(self) -> Tensor:
        """The map [d, outputs], a view of the table: without means."""
        return self._embedding[0].table.T

    def project(self, normalised: Tensor) -> Tensor:
        rows = kernels.project_rows(normalised, self.read.gain, self._embedding[0].table)
        if self.mean is None or self.spread is None:
            return rows
        common = kernels.project_rows(normalised, self.read.gain, self.spread[None])[0]
        # One pass over the outputs: they are far larger than the two vectors.
        return torch.addr(rows, self.mean.to(rows.dtype), common)

    def axes(self, name: str) -> list[Axis]:
        """What `tied_axis` joins with the axis of the embedding."""
        rows = () if self.spread is None else (Slot(f"{name}.spread"),)
        return [self.read.axis(name, "d_c", rows, silences=self.bias is None)]

    def fixed(self, name: str) -> list[Slot]:
        means = [] if self.mean is None else [Slot(f"{name}.mean")]
        return super().fixed(name) + means

    def matrices(self, name: str) -> dict[str, int]:
        return {}

    def costs(self, name: str) -> list[Cost]:
        costs = [Cost("scale", 1, (self._axis,)), Cost("matmul", self.outputs, (self._axis,))]
        if self.spread is not None:  # and the means, whose number no cut changes
            costs += [Cost("scale", 1, (self._axis,)), Cost("scale", self.outputs, ())]
        return costs

    def operations(self, name: str) -> list[Operation]:
        return [Operation("read", (size(self._axis), Size(constant=self.outputs)))]


def tied_axis(axes: Sequence[Axis]) -> list[Axis]:
    """The axes of a model, with its first (of the embedding) and last (of the classifier) as one.

    Side A are both factors, side B the table, with positions and the spread of means where there
    are any. Factors are on side A as gains are: a new index is born with a zero side A, and a gain
    may be in its norm.
    """
    embedding, *between, classifier = axes
    factors: tuple[Slot, ...] = (*embedding.side_b, *classifier.side_a)
    joined = Axis(
        embedding.name,
        embedding.kind,
        factors,
        (*embedding.side_a, *classifier.side_b),
        (*embedding.riders, *classifier.riders),
        owner=embedding.owner,
        silences=classifier.silences,
        growth=embedding.growth,
    )
    return [joined, *between]
