"""The axis table: which dims of which tensors form one removable index.

Everything else (penalty, price, balance, drop, surgery, checkpoint, report) is
generic over this table. It is a declaration by the model, never traced, and it
refuses to be wrong: `AxisTable.check` accounts for every dim of every tensor.
Knows nothing of losses, training or particular architectures.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from gaugelasso.errors import UserError

Tensors = Mapping[str, Tensor]
Side = Literal["a", "b"]


class AxisError(UserError):
    """A model's axis table contradicts its tensors."""


@dataclass(frozen=True)
class Slot:
    """One tensor's dim on an axis.

    `link` names an integer buffer that maps positions along `dim` to indices of
    the axis; without it position and index are the same. `power` is how a rider
    follows a balance by c: it is multiplied by c**power. (Side A goes with c,
    side B with 1/c.) `stage` orders the writers (side A) and readers (side B) of a linked
    axis in time: what is written after the last reading, or read before the first
    writing, is dead, and an index may be split in time. Without it a writer comes before
    every reader.

        Slot("attention_0.query", 0)                        # rows of W_q
        Slot("attention_0.read.gain", 0, link="attention_0.read.sites")
    """

    tensor: str
    dim: int = 0
    link: str | None = None
    power: int = 0
    stage: int | None = None


@dataclass(frozen=True)
class Axis:
    """A removable set of indices: two penalised gauge sides and the riders freed with them.

    `silences`: whether its owner writes nothing once the axis is empty. Keys do not
    silence attention (without them it is a plain mean of the values), so their last
    index stays as long as the operator does.
    """

    name: str
    kind: str
    side_a: tuple[Slot, ...]
    side_b: tuple[Slot, ...]
    riders: tuple[Slot, ...] = ()
    owner: str | None = None
    silences: bool = True

    def sides(self) -> Iterator[tuple[Side, tuple[Slot, ...]]]:
        yield "a", self.side_a
        yield "b", self.side_b

    def slots(self) -> tuple[Slot, ...]:
        return self.side_a + self.side_b + self.riders

    def direct(self) -> tuple[Slot, ...]:
        """The slots whose positions are the axis's own indices."""
        return self._direct

    def linked(self) -> tuple[Slot, ...]:
        """The penalised slots that reach the axis through a position map."""
        return self._linked

    # An event asks for these thousands of times.
    @cached_property
    def _direct(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots() if slot.link is None)

    @cached_property
    def _linked(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.side_a + self.side_b if slot.link is not None)


@dataclass(frozen=True)
class Cost:
    """One term of the work per token: `factor` times the product of the axes' widths.

    `kind` tells an accounting what sort of work it is. `unit` is the number of
    channels in one index (2 for a RoPE pair).
    """

    kind: Literal["matmul", "lookup", "scale", "rotation", "scores", "mix"]
    factor: int
    axes: tuple[str, ...]
    unit: int = 1


@dataclass(frozen=True)
class Norm:
    """The tensors of one slow normaliser: learned gain, slow weights, last input energy."""

    gain: str
    weight: str
    energy: str


@dataclass(frozen=True)
class AxisTable:
    """A model's whole declaration.

    `fixed` lists the dims that never shrink; `matrices` how many leading dims of a
    tensor are the rows of the linear map it is (tensors not listed are vectors or
    tables); `required` the owners that may never vanish; `context` the sequence
    length at inference and the mean number of keys a query sees.
    """

    axes: tuple[Axis, ...]
    fixed: tuple[Slot, ...] = ()
    matrices: Mapping[str, int] = field(default_factory=dict)
    norms: tuple[Norm, ...] = ()
    costs: tuple[Cost, ...] = ()
    required: frozenset[str] = frozenset()
    context: tuple[int, float] = (1, 1.0)

    def __getitem__(self, name: str) -> Axis:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Axis]:
        return {axis.name: axis for axis in self.axes}

    def owners(self) -> dict[str, tuple[str, ...]]:
        """Operator name -> the names of its axes."""
        owned: dict[str, tuple[str, ...]] = {}
        for axis in self.axes:
            if axis.owner is not None:
                owned[axis.owner] = (*owned.get(axis.owner, ()), axis.name)
        return owned

    def home(self, slot: Slot) -> str:
        """The axis whose indices are the positions of this tensor's dim."""
        return self._homes[slot.tensor, slot.dim]

    @cached_property
    def _homes(self) -> dict[tuple[str, int], str]:
        return {(s.tensor, s.dim): axis.name for axis in self.axes for s in axis.direct()}

    def links(self) -> list[str]:
        """The position maps, each once."""
        return list(dict.fromkeys(str(s.link) for axis in self.axes for s in axis.linked()))

    def widths(self, tensors: Tensors) -> dict[str, int]:
        """Axis name -> number of indices, read off the shapes."""
        return {axis.name: width(axis, tensors) for axis in self.axes}

    def check(self, tensors: Tensors) -> None:
        """Raise AxisError unless every dim of every tensor is on one axis or declared fixed."""
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise AxisError(f"two axes share a name: {sorted(names)}")
        owner_of = self._claim_dims(tensors)
        self._check_sides(tensors)
        self._check_links(tensors, owner_of)
        self._check_mentions(tensors, names)

    def _claim_dims(self, tensors: Tensors) -> dict[tuple[str, int], str]:
        """Who each (tensor, dim) belongs to; every one to exactly one."""
        seen: dict[tuple[str, int], str] = {}
        for axis in self.axes:
            if not axis.side_a or not axis.side_b:
                raise AxisError(f"axis {axis.name!r}: both sides need at least one slot")
            if not axis.direct():
                raise AxisError(f"axis {axis.name!r}: no tensor carries its width")
            for slot in axis.slots():
                _check_slot(f"axis {axis.name!r}", slot, tensors)
            for slot in axis.direct():
                _claim(seen, slot, f"axis {axis.name!r}")
            width(axis, tensors)
        for slot in self.fixed:
            _check_slot("fixed", slot, tensors)
            _claim(seen, slot, "fixed")
        for name, tensor in tensors.items():
            for dim in range(tensor.ndim):
                if (name, dim) not in seen:
                    raise AxisError(
                        f"tensor {name!r} dim {dim} (size {tensor.shape[dim]}) is on no axis "
                        "and not declared fixed"
                    )
        return seen

    def _check_sides(self, tensors: Tensors) -> None:
        penalised: dict[str, int] = {}
        for axis in self.axes:
            for slot in axis.side_a + axis.side_b:
                if not isinstance(tensors[slot.tensor], nn.Parameter):
                    raise AxisError(
                        f"axis {axis.name!r}: {slot.tensor!r} is a buffer, it cannot be penalised"
                    )
                penalised[slot.tensor] = penalised.get(slot.tensor, 0) + 1
        for name, number in penalised.items():
            if number > 2:
                raise AxisError(f"tensor {name!r} is penalised on {number} axes, at most 2")

    def _check_links(self, tensors: Tensors, owner_of: Mapping[tuple[str, int], str]) -> None:
        for axis in self.axes:
            for slot in axis.slots():
                if slot.link is None:
                    continue
                home = owner_of[slot.tensor, slot.dim]
                if home == "fixed":
                    raise AxisError(
                        f"axis {axis.name!r}: {slot.tensor!r} cannot shrink, it is fixed"
                    )
                _check_link(axis, slot, tensors)
                if owner_of[slot.link, 0] != home:
                    raise AxisError(
                        f"axis {axis.name!r}: {slot.link!r} does not shrink with {slot.tensor!r}"
                    )

    def _check_mentions(self, tensors: Tensors, names: list[str]) -> None:
        for name, rows in self.matrices.items():
            if name not in tensors:
                raise AxisError(f"matrices: the model has no tensor {name!r}")
            if not 0 < rows < tensors[name].ndim:
                raise AxisError(f"matrices: {name!r} has {tensors[name].ndim} dims, {rows} as rows")
        for norm in self.norms:
            for name in (norm.gain, norm.weight, norm.energy):
                if name not in tensors:
                    raise AxisError(f"norms: the model has no tensor {name!r}")
        for owner in self.required - self.owners().keys():
            raise AxisError(f"required: no axis is owned by {owner!r}")
        for cost in self.costs:
            for axis_name in cost.axes:
                if axis_name not in names:
                    raise AxisError(f"cost {cost.kind!r} names the unknown axis {axis_name!r}")


def _check_slot(where: str, slot: Slot, tensors: Tensors) -> None:
    for name in (slot.tensor, slot.link):
        if name is not None and name not in tensors:
            raise AxisError(f"{where}: the model has no tensor {name!r}")
    if not 0 <= slot.dim < tensors[slot.tensor].ndim:
        shape = tuple(tensors[slot.tensor].shape)
        raise AxisError(f"{where}: tensor {slot.tensor!r} {shape} has no dim {slot.dim}")


def _check_link(axis: Axis, slot: Slot, tensors: Tensors) -> None:
    assert slot.link is not None
    link = tensors[slot.link]
    length = tensors[slot.tensor].shape[slot.dim]
    if link.shape != (length,):
        raise AxisError(
            f"axis {axis.name!r}: {slot.link!r} has shape {tuple(link.shape)}, "
            f"{slot.tensor!r} needs ({length},)"
        )
    size = width(axis, tensors)
    if length and (int(link.min()) < 0 or int(link.max()) >= size):
        raise AxisError(f"axis {axis.name!r}: {slot.link!r} points outside 0..{size - 1}")
    if torch.unique(link).numel() != length:
        raise AxisError(f"axis {axis.name!r}: {slot.link!r} names an index twice")


def _claim(seen: dict[tuple[str, int], str], slot: Slot, who: str) -> None:
    key = (slot.tensor, slot.dim)
    if key in seen:
        raise AxisError(
            f"tensor {slot.tensor!r} dim {slot.dim} is claimed by {seen[key]} and {who}"
        )
    seen[key] = who


class Compressible(nn.Module):
    """What a model offers to be compressed: its table, and a way to lose an operator."""

    def axis_table(self) -> AxisTable:
        """The declaration for the model as it stands now."""
        raise NotImplementedError

    def remove_operator(self, name: str) -> None:
        """Take out the operator that the table's axes call their owner.

        A cut may be undone: modules, parameters and buffers are put back, nothing else is.
        """
        raise NotImplementedError

    def structure(self) -> dict:
        """A JSON-ready description from which the same shapes can be built."""
        raise NotImplementedError


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a model by its qualified name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def on_host(tensors: Tensors, names: Iterable[str]) -> dict[str, Tensor]:
    """CPU copies of some tensors of one dtype.

    One transfer for all: each would wait for the device.
    """
    chosen = {name: tensors[name].detach() for name in names}
    if not chosen:
        return {}
    flat = torch.cat([tensor.reshape(-1) for tensor in chosen.values()]).cpu()
    parts = flat.split([tensor.numel() for tensor in chosen.values()])
    return {name: part.view(chosen[name].shape) for name, part in zip(chosen, parts, strict=True)}


def width(axis: Axis, tensors: Tensors) -> int:
    """The number of indices of an axis; its direct slots must agree."""
    sizes = {slot.tensor: tensors[slot.tensor].shape[slot.dim] for slot in axis.direct()}
    if len(set(sizes.values())) != 1:
        raise AxisError(f"axis {axis.name!r}: its tensors disagree on the width: {sizes}")
    return next(iter(sizes.values()))


def spread(values: Tensor, slot: Slot, tensors: Tensors) -> Tensor:
    """Per-index values laid along the slot's dim, ready to broadcast over its tensor."""
    if slot.link is not None:
        values = values[tensors[slot.link]]
    shape = [1] * tensors[slot.tensor].ndim
    shape[slot.dim] = -1
    return values.reshape(shape)


def collect(data: Tensor, slot: Slot, tensors: Tensors, size: int) -> Tensor:
    """Sum `data` (shaped as the slot's tensor) over everything but the axis's indices."""
    others = [dim for dim in range(data.ndim) if dim != slot.dim]
    sums = data.sum(dim=others) if others else data
    if slot.link is None:
        return sums
    return torch.zeros(size, dtype=sums.dtype, device=sums.device).index_add(
        0, tensors[slot.link], sums
    )


def side_counts(axis: Axis, slots: tuple[Slot, ...], tensors: Tensors) -> Tensor:
    """n: the number of elements of each index's slice on one side."""
    size = width(axis, tensors)
    total = torch.zeros(size, dtype=torch.float64, device=tensors[slots[0].tensor].device)
    for slot in slots:
        tensor = tensors[slot.tensor]
        per_position = tensor.numel() // max(tensor.shape[slot.dim], 1)
        if slot.link is None:
            total += per_position
        else:
            ones = torch.ones(tensor.shape[slot.dim], dtype=total.dtype, device=total.device)
            total.index_add_(0, tensors[slot.link], ones, alpha=per_position)
    return total


def side_rms(axis: Axis, slots: tuple[Slot, ...], tensors: Tensors) -> Tensor:
    """epsilon = ||slice|| / sqrt(n), per index; 0 where the side is empty."""
    size = width(axis, tensors)
    reference = tensors[slots[0].tensor]
    total = torch.zeros(size, dtype=reference.dtype, device=reference.device)
    for slot in slots:
        total = total + collect(tensors[slot.tensor].detach().square(), slot, tensors, size)
    count = side_counts(axis, slots, tensors).to(total)
    return (total / count.clamp(min=1)).sqrt()
