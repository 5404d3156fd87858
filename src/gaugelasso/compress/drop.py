"""Drop: decide which indices go, and what their going takes along.

Trust-drop looks at how near an index is to zero; the cascade follows the table
until nothing is left half-connected. Decides only; surgery cuts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaugelasso.axes import Axis, AxisTable, Slot, Tensors, width
from gaugelasso.compress.groups import Groups
from gaugelasso.compress.penalty import ranked


@dataclass(frozen=True)
class Decision:
    """Keep-sets for every axis (bool per index, CPU) and the operators that vanish."""

    keeps: dict[str, Tensor]
    removed: tuple[str, ...] = ()

    def dropped(self) -> dict[str, int]:
        """Axis name -> how many of its indices go; axes that lose none are left out."""
        counts = {name: int((~keep).sum()) for name, keep in self.keeps.items()}
        return {name: number for name, number in counts.items() if number}

    def saved(self, prices: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Axis name -> what its indices that go saved each on its own."""
        return {
            name: float(prices[name][~self.keeps[name].numpy()].sum()) for name in self.dropped()
        }


NOTHING = Decision({})


def newly_kept(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, int]:
    """Axis name -> how many indices the later keep-sets keep besides; axes without are left out."""
    counts = {name: int((after[name] & ~keep).sum()) for name, keep in before.items()}
    return {name: number for name, number in counts.items() if number}


def channel_rms(groups: Groups, weight: Tensor) -> dict[str, Tensor]:
    """sqrt(eps_A eps_B) of every index: its gauge-invariant distance to zero (CPU)."""
    rms = (groups.sums(weight.square()) / groups.counts.clamp(min=1)).sqrt()
    mean = (rms * rms[groups.partner]).sqrt().cpu()
    return {name: mean[span.side("a")] for name, span in groups.ranges.items()}


def dominates_norm(table: AxisTable, tensors: Tensors, share: float = 0.01) -> dict[str, Tensor]:
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


def candidates(
    table: AxisTable, tensors: Tensors, rms: dict[str, Tensor], threshold: float, multiple: int
) -> dict[str, Tensor]:
    """Keep-sets by trust-drop, less what would stay anyway to make up a multiple.

    Nobody should be asked about that.
    """
    keeps = trust_drop(table, rms, threshold, dominates_norm(table, tensors))
    if multiple > 1 and (likely := close_and_round(table, tensors, keeps, rms, multiple)):
        keeps = {name: keep | likely.keeps[name] for name, keep in keeps.items()}
    return keeps


def grains(table: AxisTable, multiple: int) -> dict[str, int]:
    """Axis name -> how many indices make up a multiple of `multiple` channels.

    A RoPE pair is two channels, so a head needs half as many pairs. No product runs over an
    axis that is reached through position maps (the stream): it may have any width.
    """
    units = {name: cost.unit for cost in table.costs for name in cost.axes if cost.unit > 1}
    return {
        axis.name: 1 if axis.linked() else multiple // math.gcd(multiple, units.get(axis.name, 1))
        for axis in table.axes
    }


def hold_back_(keeps: dict[str, Tensor], rms: dict[str, Tensor], grain: dict[str, int]) -> None:
    """Of what would go, the strongest stay until the number kept is a multiple of the grain.

    Where too few would go for that, all stay. An axis that loses everything loses it.
    """
    for name, keep in keeps.items():
        going = (~keep).nonzero().view(-1)
        number = min(-int(keep.sum()) % grain[name], len(going))
        if number:
            keep[going[rms[name][going].topk(number).indices]] = True


def next_to_go(
    table: AxisTable, utility: dict[str, Tensor], prices: dict[str, np.ndarray], most: int = 10
) -> list[dict[str, Any]]:
    """The indices that give least for what they cost, least first: rows for a summary.

    As in `trust_drop`, an axis that does not silence its owner keeps its strongest index.
    """
    kept = {(a.name, int(utility[a.name].argmax())) for a in table.axes if not a.silences}
    rows = [
        {
            "axis": name,
            "index": index,
            "price": float(prices[name][index]),
            "utility_per_fma": share,
        }
        for share, name, index in ranked(utility, prices)
        if math.isfinite(share) and (name, index) not in kept
    ]
    return rows[:most]


def cascade(table: AxisTable, tensors: Tensors, keeps: dict[str, Tensor]) -> Decision | None:
    """Close keep-sets under connection; None if a required operator would vanish.

    - an operator with an empty axis goes, with all its axes;
    - a position that reaches an index of a linked axis (a residual site) goes with it,
      and also when nobody reads what it writes later, or wrote what it reads before;
    - an index without positions goes.
    """
    keeps = {name: keep.clone() for name, keep in keeps.items()}
    links = {
        slot: tensors[str(slot.link)].cpu().numpy() for axis in table.axes for slot in axis.linked()
    }
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


def close_and_round(
    table: AxisTable,
    tensors: Tensors,
    keeps: dict[str, Tensor],
    rms: dict[str, Tensor],
    multiple: int,
) -> Decision | None:
    """The cascade, and `hold_back_` from what goes by it: what keep-sets come to.

    What the cascade takes does nothing, and is as good as any to fill up a width. It
    leaves once enough others leave with it.
    """
    decision = cascade(table, tensors, keeps)
    if decision is None:
        return None
    hold_back_(decision.keeps, rms, grains(table, multiple))
    for axis in table.axes:
        for slot in axis.linked():
            sites = tensors[str(slot.link)].cpu()
            decision.keeps[axis.name][sites[decision.keeps[table.home(slot)]]] = True
    return decision


def _connect_(
    table: AxisTable, axis: Axis, keeps: dict[str, Tensor], links: dict[Slot, np.ndarray]
) -> bool:
    """Keep the connected positions of a linked axis and the indices that have any.

    True if something went.
    """
    # NumPy: on vectors this short its calls cost a fraction of a tensor's.
    site_kept = keeps[axis.name].numpy()
    written = np.full(site_kept.shape, math.inf)  # when first
    read = np.full(site_kept.shape, -math.inf)  # when last
    for slots, when, nearer in (
        (axis.side_a, written, np.minimum),
        (axis.side_b, read, np.maximum),
    ):
        for slot in slots:
            # A position map names no index twice.
            sites = links[slot][keeps[table.home(slot)].numpy()]
            when[sites] = nearer(when[sites], _stage(axis, slot))
    reached = np.zeros_like(site_kept)
    changed = False
    writers = set(axis.side_a)
    for slot in axis.linked():
        home, sites, stage = table.home(slot), links[slot], _stage(axis, slot)
        alive = read[sites] > stage if slot in writers else written[sites] < stage
        before = keeps[home].numpy()
        kept = before & alive & site_kept[sites]
        changed |= not np.array_equal(kept, before)
        keeps[home] = torch.from_numpy(kept)
        reached[sites[kept]] = True
    changed |= not np.array_equal(reached, site_kept)
    keeps[axis.name] = torch.from_numpy(reached)
    return changed


def _stage(axis: Axis, slot: Slot) -> float:
    """When a slot writes or reads; unordered ones write before and read after all others."""
    if slot.stage is not None:
        return float(slot.stage)
    return -1e9 if slot in axis.side_a else 1e9
