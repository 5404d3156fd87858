"""Growth: add indices to axes without a change of the function.

A linear axis is rotated into more dims (Procrustes growth). On every other axis a new index is
silent: one side is zero, the other has a typical norm. Weights, buffers and optimizer state grow
together. Knows nothing of why an axis grows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gaugelasso.axes import Axis, AxisError, AxisTable, Slot, Tensors, width

# Axis name -> number of indices to add.
Births = Mapping[str, int]


def procrustes_map(size: int, number: int, generator: torch.Generator) -> Tensor:
    """A random orthonormal (d + k) x d map Q, as near to [1; 0] as a rotation of its domain allows.

    Q^T Q = 1, so (Q A)^T (Q B) = A^T B. Among Q R with orthogonal R, tr(Q_1 R) is largest for
    R = V U^T, where Q_1 = U S V^T are the first d rows (orthogonal Procrustes). They become
    U S U^T: d - k of the singular values are 1, and the others are the cosines of random angles.
    """
    shape = size + number, size
    random = torch.randn(shape, generator=generator, dtype=torch.float64)
    basis, _ = torch.linalg.qr(random)
    u, _, vt = torch.linalg.svd(basis[:size])
    return basis @ vt.T @ u.T


def room(table: AxisTable, axis: Axis, tensors: Tensors) -> float:
    """How many indices an axis can get; infinite without position maps."""
    if not can_grow(table, axis):
        return 0
    free = _free_for_all(table, axis, tensors)
    return math.inf if free is None else len(free)


def rank(axis: Axis, tensors: Tensors) -> float:
    """The most indices of a linear axis that can differ in what they do; else infinite.

    The product over the axis has no higher rank than either side has other elements.
    """
    if axis.growth != "linear":
        return math.inf
    sides = (axis.side_a, axis.side_b)
    return min(
        sum(tensors[slot.tensor].numel() // tensors[slot.tensor].shape[slot.dim] for slot in side)
        for side in sides
    )


def can_grow(table: AxisTable, axis: Axis) -> bool:
    """Whether the table says how the axis, and every axis that reaches it by links, may grow."""
    homes = [table[table.home(slot)] for slot in axis.linked()]
    return axis.growth is not None and all(home.growth == "permutation" for home in homes)


def grown_widths(table: AxisTable, births: Births) -> dict[str, int]:
    """Axis name -> the number of new indices, also of axes that a new index reaches by links."""
    total = dict(births)
    for name, number in births.items():
        for home in dict.fromkeys(table.home(slot) for slot in table[name].linked()):
            total[home] = total.get(home, 0) + number
    return total


@dataclass(frozen=True)
class Grown:
    """A model's tensors after growth, and its optimizer's state vectors as tensors by name."""

    tensors: dict[str, Tensor]
    states: list[dict[str, Tensor]]


def grow(
    tensors: Tensors,
    table: AxisTable,
    births: Births,
    generator: torch.Generator,
    states: Sequence[tuple[int, Tensors]] = (),
) -> Grown:
    """Every parameter and buffer after growth, as new tensors; the model does not change.

    `states` are the power and the views of each of the optimizer's state vectors. AxisError for an
    axis that is unknown, cannot grow, or has no room. Draws on the CPU, in the order of the table,
    so a seed leads to the same weights on any device.
    """
    _check(tensors, table, births)
    work = _Growing(table, tensors, states, generator)
    for axis in table.axes:
        number = births.get(axis.name, 0)
        if number and axis.growth == "linear":
            work.rotate_(axis, number)
        elif number and axis.linked():
            work.add_sites_(axis, number)
        elif number:
            work.add_silent_(axis, number)
    return Grown(work.tensors, work.states)


def _check(tensors: Tensors, table: AxisTable, births: Births) -> None:
    known = {axis.name: axis for axis in table.axes}
    for name, number in births.items():
        if name not in known:
            raise AxisError(f"there is no axis {name!r} to grow; axes are {', '.join(known)}")
        if number < 0:
            raise AxisError(f"axis {name!r} cannot grow by {number} indices")
        if number and not can_grow(table, known[name]):
            raise AxisError(
                f"axis {name!r} cannot grow: the table does not say how; declare "
                "Axis(growth=...) for it and for the axes that reach it by links"
            )
        if number > (left := room(table, known[name], tensors)):
            raise AxisError(
                f"axis {name!r} cannot grow by {number}: there are {left} further indices that its "
                "position map could name"
            )


class _Growing:
    """Tensors and state while axes grow one after another."""

    def __init__(
        self,
        table: AxisTable,
        tensors: Tensors,
        states: Sequence[tuple[int, Tensors]],
        generator: torch.Generator,
    ):
        self._table, self._generator = table, generator
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.states = [dict(views) for _, views in states]
        self._powers = [power for power, _ in states]
        self._trained = {name for name, t in tensors.items() if isinstance(t, nn.Parameter)}
        self._slow = {name for norm in table.norms for name in (norm.weight, norm.energy)}
        self._links = set(table.links())

    def rotate_(self, axis: Axis, number: int) -> None:
        """T <- Q T on both sides.

        State that is like a gradient or a weight follows by Q too, as Q is an isometry. Squares
        follow by the squares of Q: the expected square of a sum of uncorrelated parts.
        """
        q = procrustes_map(width(axis, self.tensors), number, self._generator)
        for slot in axis.side_a + axis.side_b:
            name, dim = slot.tensor, slot.dim
            self.tensors[name] = _mapped(self.tensors[name], dim, q)
            for power, views in zip(self._powers, self.states, strict=True):
                if name in views:
                    views[name] = _mapped(views[name], dim, q if power % 2 else q.square())

    def add_silent_(self, axis: Axis, number: int) -> None:
        """New indices without an effect, each at an index of the stream that its map lacks."""
        sites = {}
        free = _free_for_all(self._table, axis, self.tensors)
        if free is not None:
            order = torch.randperm(len(free), generator=self._generator)[:number]
            sites = dict.fromkeys(_own_links(self._table, axis), free[order])
        silent = {slot.tensor for slot in _silent_side(axis)}
        self._add_(axis, number, silent, sites)

    def add_sites_(self, axis: Axis, number: int) -> None:
        """New indices of a stream: every writer writes them, and every reader has a zero gain.

        So a reader's normaliser does not change, and what is written is random, not zero.
        """
        size = width(axis, self.tensors)
        silent = {slot.tensor for slot in axis.side_b}
        self._add_(axis, number, silent, {})
        for home, slots in self._table.uses(axis).items():
            new = torch.arange(size, size + number)
            self._add_(self._table[home], number, silent, {str(slot.link): new for slot in slots})

    def _add_(self, axis: Axis, number: int, silent: set[str], sites: Mapping[str, Tensor]) -> None:
        """Append indices to every tensor of an axis; state of what is new is zero."""
        parents = torch.randint(width(axis, self.tensors), (number,), generator=self._generator)
        for slot in axis.direct():
            name, old = slot.tensor, self.tensors[slot.tensor]
            if name in sites:
                new = sites[name].to(old)
            elif name in self._slow or name in silent:
                new = old.new_zeros(_resized(old, slot.dim, number))
            elif name in self._trained:
                new = self._typical(old, slot.dim, number)
            else:
                new = old.index_select(slot.dim, parents.to(old.device))
            self.tensors[name] = torch.cat([old, new], slot.dim)
            for views in self.states:
                if name in views:
                    view = views[name]
                    zeros = view.new_zeros(_resized(view, slot.dim, number))
                    views[name] = torch.cat([view, zeros], slot.dim)

    def _typical(self, tensor: Tensor, dim: int, number: int) -> Tensor:
        """Random slices along `dim`, with the root mean square of the norms of the old ones."""
        shape = _resized(tensor, dim, number)
        random = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        rows = random.movedim(dim, 0).reshape(number, -1)
        rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
        slices = random.movedim(dim, 0).shape
        norm = tensor.double().norm() / math.sqrt(tensor.shape[dim])
        return (rows.reshape(slices).movedim(0, dim).to(tensor.device) * norm).to(tensor)


def _mapped(tensor: Tensor, dim: int, matrix: Tensor) -> Tensor:
    """The matrix applied along one dim; in float64, because GPUs may round products to TF32."""
    exact = tensor.double()
    mapped = torch.tensordot(matrix.to(exact), exact, dims=([1], [dim]))
    return mapped.movedim(0, dim).to(tensor.dtype).contiguous()


def _resized(tensor: Tensor, dim: int, number: int) -> list[int]:
    return [number if each == dim else size for each, size in enumerate(tensor.shape)]


def _silent_side(axis: Axis) -> tuple[Slot, ...]:
    """The side that is zero at birth: A, or B where an index with a zero side A may contribute.

    A normaliser's gain is on side A, so a new input is outside of every kind of norm.
    """
    alone = axis.gauge and not any(slot.power % 2 for slot in axis.riders)
    return axis.side_a if alone else axis.side_b


def _own_links(table: AxisTable, axis: Axis) -> list[str]:
    """The position maps whose positions are the indices of this axis."""
    links = set(table.links())
    return [slot.tensor for slot in axis.direct() if slot.tensor in links]


def _free_for_all(table: AxisTable, axis: Axis, tensors: Tensors) -> Tensor | None:
    """The indices of a stream that all position maps of an axis could name; None without maps.

    A tied table has two: of what it writes and of what it reads.
    """
    maps = [set(_free_indices(table, link, tensors).tolist()) for link in _own_links(table, axis)]
    return torch.tensor(sorted(set.intersection(*maps)), dtype=torch.long) if maps else None


def _free_indices(table: AxisTable, link: str, tensors: Tensors) -> Tensor:
    """The indices of a stream that a position map could name, with an effect, and does not.

    A reader needs an earlier writer, and a writer a later reader.
    """
    for axis in table.axes:
        own = next((slot for slot in axis.linked() if slot.link == link), None)
        if own is None:
            continue
        reads = own in axis.side_b
        found = torch.zeros(width(axis, tensors), dtype=torch.bool)
        for slot in axis.side_a if reads else axis.side_b:
            first, then = (slot, own) if reads else (own, slot)
            if slot.link is not None and _before(first, then):
                found[tensors[slot.link].cpu()] = True
        found[tensors[link].cpu()] = False
        return found.nonzero().squeeze(1)
    raise AxisError(f"position map {link!r} belongs to no axis")


def _before(writer: Slot, reader: Slot) -> bool:
    """Whether what is written can be read; without stages, every writer comes first."""
    unordered = writer.stage is None or reader.stage is None
    return unordered or writer.stage < reader.stage  # type: ignore[operator]
