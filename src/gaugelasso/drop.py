"""Drop: decide which indices go, and what their going takes along.

Trust-drop looks at how near an index is to zero; the cascade follows the table
until nothing is left half-connected. Decides only; surgery cuts.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugelasso.axes import Axis, AxisTable, Slot, Tensors, side_rms, spread, width


@dataclass(frozen=True)
class Decision:
    """Keep-sets for every axis (bool per index, CPU) and the operators that vanish."""

    keeps: dict[str, Tensor]
    removed: tuple[str, ...] = ()

    def dropped(self) -> dict[str, int]:
        """Axis name -> how many of its indices go; axes that lose none are left out."""
        counts = {name: int((~keep).sum()) for name, keep in self.keeps.items()}
        return {name: number for name, number in counts.items() if number}


def channel_rms(table: AxisTable, tensors: Tensors) -> dict[str, Tensor]:
    """sqrt(eps_A eps_B) of every index: its gauge-invariant distance to zero (CPU)."""
    names = [axis.name for axis in table.axes]
    values = [
        (side_rms(axis, axis.side_a, tensors) * side_rms(axis, axis.side_b, tensors)).sqrt()
        for axis in table.axes
    ]
    # One transfer for all axes: each would wait for the device.
    flat = torch.cat(values).cpu()
    return dict(zip(names, flat.split([len(v) for v in values]), strict=True))


def ruling(table: AxisTable, tensors: Tensors, share: float = 0.01) -> dict[str, Tensor]:
    """Indices that still carry more than `share` of a normaliser's mean (CPU).

    Such an index may have no gain left and yet set the scale of all others: cut, it
    would change every output. Its slow weight fades after its gain; then it may go.
    """
    held = {axis.name: torch.zeros(width(axis, tensors), dtype=torch.bool) for axis in table.axes}
    homes = {slot.tensor: axis.name for axis in table.axes for slot in axis.direct()}
    for norm in table.norms:
        parts = tensors[norm.weight] * tensors[norm.energy]
        held[homes[norm.gain]] |= (parts > share * parts.sum()).cpu()
    for axis in table.axes:
        for slot in axis.linked():
            positions = tensors[str(slot.link)].cpu()
            held[axis.name][positions[held[table.home(slot)]]] = True
    return held


def trust_drop(
    table: AxisTable, rms: dict[str, Tensor], threshold: float, held: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Keep what is further from zero than `threshold` = k lr (paper, eq. trust_drop) or held.

    An axis that does not silence its owner keeps its strongest index: emptying it
    would take away an operator that still works.
    """
    keeps = {name: (values > threshold) | held[name] for name, values in rms.items()}
    for axis in table.axes:
        if not axis.silences:
            keeps[axis.name][rms[axis.name].argmax()] = True
    return keeps


@contextmanager
def silenced(table: AxisTable, tensors: Tensors, keeps: dict[str, Tensor]) -> Iterator[None]:
    """For a while, every index that is to go is zero on side A: the cut, undone afterwards."""
    before = []
    for name, keep in keeps.items():
        for slot in table[name].side_a if not bool(keep.all()) else ():
            tensor = tensors[slot.tensor].detach()
            before.append((tensor, tensor.clone()))
            tensor.mul_(spread(keep.to(tensor), slot, tensors))
    try:
        yield
    finally:
        for tensor, values in reversed(before):
            tensor.copy_(values)


def spare_missed(
    table: AxisTable,
    tensors: Tensors,
    keeps: dict[str, Tensor],
    probe: Callable[[], float],
    bound: float,
) -> dict[str, Tensor]:
    """Take back drops that a batch misses: alone, their silence lifts its loss above `bound`.

    Nearness to zero is relative to what the rest of the network makes of a channel: a
    reader with a large gain can depend on one that is a step from zero.
    """
    with silenced(table, tensors, keeps):
        if probe() <= bound:
            return keeps
    spared = {}
    for name, keep in keeps.items():
        spared[name] = keep.clone()
        with silenced(table, tensors, {name: keep}):
            if bool(keep.all()) or probe() <= bound:
                continue
        for index in (~keep).nonzero().squeeze(1).tolist():
            alone = torch.ones_like(keep)
            alone[index] = False
            with silenced(table, tensors, {name: alone}):
                spared[name][index] = not probe() <= bound
    return spared


def cascade(table: AxisTable, tensors: Tensors, keeps: dict[str, Tensor]) -> Decision | None:
    """Close keep-sets under connection; None if a required operator would vanish.

    - an operator with an empty axis goes, with all its axes;
    - a position that reaches an index of a linked axis (a residual site) goes with it,
      and also when nobody reads what it writes later, or wrote what it reads before;
    - an index without positions goes.
    """
    keeps = {name: keep.clone() for name, keep in keeps.items()}
    links = {slot: tensors[str(slot.link)].cpu() for axis in table.axes for slot in axis.linked()}
    owners = table.owners()
    gone: list[str] = []
    changed = True
    while changed:
        changed = False
        for owner, names in owners.items():
            if owner not in gone and not all(bool(keeps[name].any()) for name in names):
                if owner in table.required:
                    return None
                gone.append(owner)
                for name in names:
                    keeps[name].zero_()
                changed = True
        for axis in table.axes:
            if axis.linked():
                changed |= _connect_(table, axis, keeps, links)
    return Decision(keeps, tuple(gone))


def _connect_(
    table: AxisTable, axis: Axis, keeps: dict[str, Tensor], links: dict[Slot, Tensor]
) -> bool:
    """Keep the positions of a linked axis that are connected, and its indices that have any."""
    first_written = torch.full(keeps[axis.name].shape, math.inf)
    last_read = torch.full_like(first_written, -math.inf)
    for slots, bound, reduce, unordered in (
        (axis.side_a, first_written, "amin", -1e9),
        (axis.side_b, last_read, "amax", 1e9),
    ):
        for slot in slots:
            stage = unordered if slot.stage is None else slot.stage
            sites = links[slot][keeps[table.home(slot)]]
            bound.scatter_reduce_(0, sites, torch.full(sites.shape, float(stage)), reduce)
    changed = False
    reached = torch.zeros_like(keeps[axis.name])
    for slots, writes in ((axis.side_a, True), (axis.side_b, False)):
        for slot in slots:
            home, sites = table.home(slot), links[slot]
            stage = slot.stage
            if writes:
                alive = last_read[sites] > (-1e9 if stage is None else stage)
            else:
                alive = first_written[sites] < (1e9 if stage is None else stage)
            kept = keeps[home] & alive & keeps[axis.name][sites]
            changed |= not torch.equal(kept, keeps[home])
            keeps[home] = kept
            reached[sites[kept]] = True
    reached &= keeps[axis.name]
    changed |= not torch.equal(reached, keeps[axis.name])
    keeps[axis.name] = reached
    return changed
