"""Drop: decide which indices are removed, and what else their removal removes.

Trust-drop measures how near an index is to zero. The cascade follows the table until nothing is
half connected. Decides only; surgery cuts.
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
    """Keep-sets for every axis (bool per index, on the CPU) and the operators that are removed."""

    keeps: dict[str, Tensor]
    removed: tuple[str, ...] = ()

    def dropped(self) -> dict[str, int]:
        """Axis name -> number of dropped indices, for the axes that lose any."""
        counts = {name: int((~keep).sum()) for name, keep in self.keeps.items()}
        return {name: number for name, number in counts.items() if number}

    def saved(self, prices: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Axis name -> the sum of the prices of its dropped indices."""
        return {
            name: float(prices[name][~self.keeps[name].numpy()].sum()) for name in self.dropped()
        }


NOTHING = Decision({})


def newly_kept(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, int]:
    """Axis name -> number of indices that only `after` keeps, for the axes that have any."""
    counts = {name: int((after[name] & ~keep).sum()) for name, keep in before.items()}
    return {name: number for name, number in counts.items() if number}


def channel_rms(groups: Groups, weight: Tensor) -> dict[str, Tensor]:
    """sqrt(eps_A eps_B) of every index, on the CPU: its distance to zero in any gauge."""
    rms = (groups.sums(weight, squared=True) / groups.counts.clamp(min=1)).sqrt()
    mean = (rms * rms[groups.partner]).sqrt().cpu()
    return {name: mean[span.side("a")] for name, span in groups.ranges.items()}


def dominates_norm(
    table: AxisTable, tensors: Tensors, share: float = 0.01, times_mean: float = 0.0
) -> dict[str, Tensor]:
    """Indices that contribute more than `share` to a normaliser's mean, on the CPU.

    And more than `times_mean` times what they contribute on average.

    Such an index may have almost no gain and still set the scale of all others, so that cutting
    it would change every output. Its slow weight falls after its gain does; then it may go.
    """
    found = {axis.name: torch.zeros(width(axis, tensors), dtype=torch.bool) for axis in table.axes}
    homes = {slot.tensor: axis.name for axis in table.axes for slot in axis.direct()}
    for norm in table.norms:
        parts = tensors[norm.weight] * tensors[norm.energy]
        most = max(share, times_mean / max(len(parts), 1))
        found[homes[norm.gain]] |= (parts > most * parts.sum()).cpu()
    for axis in table.axes:
        for slot in axis.linked():
            positions = tensors[str(slot.link)].cpu()
            found[axis.name][positions[found[table.home(slot)]]] = True
    return found


def trust_drop(
    table: AxisTable, rms: dict[str, Tensor], threshold: float, held: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Keep the indices with an RMS above `threshold` = k lr (paper, eq. trust_drop), and `held`.

    An axis that does not silence its owner keeps its strongest index: without it the operator
    would be removed although it still writes something.
    """
    keeps = {name: (values > threshold) | held[name] for name, values in rms.items()}
    for axis in table.axes:
        if not axis.silences and len(rms[axis.name]):
            keeps[axis.name][rms[axis.name].argmax()] = True
    return keeps


def candidates(
    table: AxisTable,
    tensors: Tensors,
    rms: dict[str, Tensor],
    threshold: float,
    multiple: int,
    preferred: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """Keep-sets by trust-drop. Indices that must stay to make up a multiple are kept too.

    Hooks and probes are then called only for indices that can really go.
    """
    keeps = trust_drop(table, rms, threshold, dominates_norm(table, tensors))
    given = (keeps, rms, multiple, preferred)
    if (multiple > 1 or preferred) and (likely := close_and_round(table, tensors, *given)):
        keeps = {name: keep | likely.keeps[name] for name, keep in keeps.items()}
    return keeps


def grains(
    table: AxisTable, multiple: int, preferred: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Axis name -> the number of indices that its width must be a multiple of.

    A RoPE pair is two channels, so a head needs half as many pairs. No matrix product runs over
    an axis with position maps (the stream), so it may have any width. `preferred` are multiples of
    single axes, which apply as well.
    """
    units = {name: cost.unit for cost in table.costs for name in cost.axes if cost.unit > 1}
    found = {
        axis.name: 1 if axis.linked() else multiple // math.gcd(multiple, units.get(axis.name, 1))
        for axis in table.axes
    }
    return found | {name: math.lcm(found[name], each) for name, each in (preferred or {}).items()}


def hold_back_(keeps: dict[str, Tensor], rms: dict[str, Tensor], grain: dict[str, int]) -> None:
    """Keep the strongest of the dropped indices until the width is a multiple of the grain.

    All stay where too few are dropped for that. An axis that loses all indices stays empty.
    """
    for name, keep in keeps.items():
        going = (~keep).nonzero().view(-1)
        number = min(-int(keep.sum()) % grain[name], len(going))
        if number:
            keep[going[rms[name][going].topk(number).indices]] = True


def next_to_go(
    table: AxisTable, utility: dict[str, Tensor], prices: dict[str, np.ndarray], most: int = 10
) -> list[dict[str, Any]]:
    """The indices with the least utility per price, least first: rows for a summary.

    As in `trust_drop`, an axis that does not silence its owner keeps its strongest index.
    """
    kept = {
        (axis.name, int(utility[axis.name].argmax()))
        for axis in table.axes
        if not axis.silences and len(utility[axis.name])
    }
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
    """Close keep-sets under connection; None if a required operator would be removed.

    - an operator with an empty axis is removed, with all its axes
    - a position of a linked axis (a residual site) is removed with its index, and also if no
      later slot reads what it writes, or no earlier slot writes what it reads; the last position
      of an axis that does not silence its owner stays, with its index
    - a position with several uses (of a tied table) stays, with their indices, until none is left
    - an index without positions is removed, unless a tensor of a side has it without a link: a
      normaliser of the whole stream, which reads and writes all that is there
    """
    keeps = {name: keep.clone() for name, keep in keeps.items()}
    links = {
        slot: np.arange(width(axis, tensors))
        if slot.link is None
        else tensors[str(slot.link)].cpu().numpy()
        for axis in table.axes
        if axis.linked()
        for slot in axis.side_a + axis.side_b
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
    preferred: Mapping[str, int] | None = None,
) -> Decision | None:
    """The decision that keep-sets lead to: the cascade, then `hold_back_` for multiples.

    What the cascade removes has no effect on the output, so it may stay to fill up a width. It is
    removed as soon as enough others are removed with it.
    """
    decision = cascade(table, tensors, keeps)
    if decision is None:
        return None
    grain = grains(table, multiple, preferred)
    if set(grain.values()) <= {1}:
        return decision  # any width is a multiple
    hold_back_(decision.keeps, rms, grain)
    for axis in table.axes:
        for slot in axis.linked():
            sites = tensors[str(slot.link)].cpu()
            decision.keeps[axis.name][sites[decision.keeps[table.home(slot)]]] = True
    return decision


def _connect_(
    table: AxisTable, axis: Axis, keeps: dict[str, Tensor], links: dict[Slot, np.ndarray]
) -> bool:
    """Keep the connected positions of a linked axis, and the indices that have any.

    True if something was removed.
    """
    # NumPy, because on short vectors its calls cost a fraction of a tensor's.
    site_kept = keeps[axis.name].numpy()
    lasting = [slot for slot in axis.linked() if not table[table.home(slot)].silences]
    for slot in lasting:  # these keep their last position, so its index stays as a whole
        sites = links[slot][keeps[table.home(slot)].numpy()]
        if len(sites) and not site_kept[sites].any():
            site_kept[sites[0]] = True
    first_write = np.full(site_kept.shape, math.inf)
    last_read = np.full(site_kept.shape, -math.inf)
    for slots, when, nearer in (
        (axis.side_a, first_write, np.minimum),
        (axis.side_b, last_read, np.maximum),
    ):
        for slot in slots:
            # A position map names no index twice.
            sites = links[slot][keeps[table.home(slot)].numpy()]
            when[sites] = nearer(when[sites], _stage(axis, slot))
    whole = any(slot.link is None for slot in axis.side_a + axis.side_b)
    reached = site_kept.copy() if whole else np.zeros_like(site_kept)
    changed = False
    writers = set(axis.side_a)
    for home, uses in table.uses(axis).items():
        before = keeps[home].numpy()
        alive = np.zeros_like(before)
        for slot in uses:
            sites, stage = links[slot], _stage(axis, slot)
            in_use = last_read[sites] > stage if slot in writers else first_write[sites] < stage
            alive |= in_use & site_kept[sites]
        kept = before & alive
        if uses[0] in lasting and before.any() and not kept.any():
            kept[before.argmax()] = True
        changed |= not np.array_equal(kept, before)
        keeps[home] = torch.from_numpy(kept)
        for slot in uses:
            reached[links[slot][kept]] = True
    changed |= not np.array_equal(reached, site_kept)
    keeps[axis.name] = torch.from_numpy(reached)
    return changed


def _stage(axis: Axis, slot: Slot) -> float:
    """The stage of a slot. Without one, it writes before and reads after all others."""
    if slot.stage is not None:
        return float(slot.stage)
    return -1e9 if slot in axis.side_a else 1e9
