"""A token table that is also the classifier's map, and the one axis of its columns.

Column j is written to a site with the scale delta_j of the embedding, and read from a site with
the gain gamma_j of the classifier. Multiply the column by c and divide both factors by c: no
output changes. So the axis has a gauge although the table has two uses, and a cut of an index is
a cut of both.
"""

from collections.abc import Sequence

from torch import Tensor

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
    ):
        norm = Extractor(sites, tied=tied, eps=eps, by_token=by_token)
        super().__init__(norm, len(embedding.table), bias)
        # In a tuple: as an attribute the module would be registered a second time.
        self._embedding = (embedding,)
        self._axis = axis

    @property
    def out(self) -> Tensor:
        """The map [d, outputs], a view of the table."""
        return self._embedding[0].table.T

    def project(self, normalised: Tensor) -> Tensor:
        return kernels.project_rows(normalised, self.read.gain, self._embedding[0].table)

    def axes(self, name: str) -> list[Axis]:
        """What `tied_axis` joins with the axis of the embedding."""
        return [self.read.axis(name, "d_c", (), silences=self.bias is None)]

    def matrices(self, name: str) -> dict[str, int]:
        return {}

    def costs(self, name: str) -> list[Cost]:
        return [Cost("scale", 1, (self._axis,)), Cost("matmul", self.outputs, (self._axis,))]

    def operations(self, name: str) -> list[Operation]:
        return [Operation("read", (size(self._axis), Size(constant=self.outputs)))]


def tied_axis(axes: Sequence[Axis]) -> list[Axis]:
    """The axes of a model, with its first (of the embedding) and last (of the classifier) as one.

    Side A are both factors, side B the table, and positions where there are any. Factors are on
    side A as gains are: a new index is born with a zero side A, and a gain may be in its norm.
    """
    embedding, *between, classifier = axes
    factors: tuple[Slot, ...] = (*embedding.side_b, *classifier.side_a)
    joined = Axis(
        embedding.name,
        embedding.kind,
        factors,
        embedding.side_a,
        (*embedding.riders, *classifier.riders),
        owner=embedding.owner,
        silences=classifier.silences,
        growth=embedding.growth,
    )
    return [joined, *between]
