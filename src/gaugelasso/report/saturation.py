"""Saturation: how much of its birth width every axis kept, and which stayed at their ceiling.

An axis at its ceiling was binding: it may want more than it was given. One that collapsed
was larger than the task requires. Over several seeds every width is the median.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gaugelasso.report.data import AXIS_WORDS, END_AXES, LAYER_KINDS, Run
from gaugelasso.report.layout import Table
from gaugelasso.report.words import DASH, width_range

CEILING = 0.9
COLLAPSED = 0.1
_FULL, _FLAT = "▲", "▼"


@dataclass(frozen=True)
class Extent:
    """One axis at birth and at the end; `depth` is None where the network has it once."""

    kind: str
    depth: int | None
    born: int
    now: int

    @property
    def share(self) -> float:
        return self.now / self.born

    @property
    def gone(self) -> bool:
        """Removed with its operator, in most seeds."""
        return self.now == 0

    @property
    def full(self) -> bool:
        return self.share >= CEILING

    @property
    def collapsed(self) -> bool:
        return self.share <= COLLAPSED


def extents(runs: Sequence[Run]) -> dict[str, list[Extent]]:
    """Axis kind -> its axes by depth; a layer that never had the operator has none."""
    found = {}
    for kind in LAYER_KINDS:
        born = _medians([run.depth_widths(kind, 0) for run in runs])
        now = _medians([run.depth_widths(kind, run.last_step) for run in runs])
        pairs = enumerate(zip(born, now, strict=True))
        found[kind] = [Extent(kind, depth, b, n) for depth, (b, n) in pairs if b]
    for kind, axis in END_AXES.items():
        ends = [[run.initial["widths"].get(axis, 0), run.widths_at(run.last_step).get(axis, 0)]
                for run in runs]  # fmt: skip
        born_once, now_once = _medians(ends)
        found[kind] = [Extent(kind, None, born_once, now_once)] if born_once else []
    return found


def saturation_table(runs: Sequence[Run]) -> Table:
    """One row an axis kind: what it kept, and where it stayed full or collapsed."""
    rows = []
    for kind, axes in extents(runs).items():
        if not axes:
            continue
        alive = [axis for axis in axes if not axis.gone]
        shares = [axis.share for axis in alive]
        rows.append([
            kind, AXIS_WORDS[kind], width_range([axis.born for axis in axes]),
            width_range([axis.now for axis in alive]) if alive else DASH,
            f"{statistics.median(shares):.0%}" if shares else DASH,
            _where([axis for axis in alive if axis.full]),
            _where([axis for axis in alive if axis.collapsed]),
            _where([axis for axis in axes if axis.gone]),
        ])  # fmt: skip
    note = f"Ceiling: at least {CEILING:.0%} of the width at birth kept. Collapsed: at most "
    note += f"{COLLAPSED:.0%}. At the end: the least and the most of the layers that are left; "
    note += f"kept: their median; layers count from 0.{_of_seeds(runs)}"
    headers = ["axis", "", "at birth", "at the end", "kept", "layers at their ceiling",
               "collapsed", "removed"]  # fmt: skip
    return Table("Saturation", headers, rows, note, left=(0, 1, 5, 6, 7))


def shares_table(runs: Sequence[Run]) -> Table:
    """Width at the end and share kept, of every axis in every layer."""
    found = {kind: {axis.depth: axis for axis in axes} for kind, axes in extents(runs).items()}
    rows = [
        [str(depth), *(_cell(found[kind].get(depth)) for kind in LAYER_KINDS)]
        for depth in range(runs[0].layers)
    ]
    births = ({axis.born for axis in found[kind].values()} for kind in LAYER_KINDS)
    rows.append(["at birth", *(width_range(sorted(born)) if born else "" for born in births)])
    ends = [f"{kind} {_cell(axis)}" for kind in END_AXES for axis in found[kind].values()]
    note = f"{'; '.join(ends)}. {_FULL} at its ceiling, {_FLAT} collapsed, {DASH} operator "
    note += f"removed.{_of_seeds(runs)}"
    return Table("Kept, layer by layer", ["layer", *LAYER_KINDS], rows, note, foot=1)


def _cell(axis: Extent | None) -> str:
    if axis is None:
        return ""
    if axis.gone:
        return DASH
    mark = f" {_FULL}" if axis.full else f" {_FLAT}" if axis.collapsed else ""
    return f"{axis.now:,} ({axis.share:.0%}){mark}"


def _medians(rows: Sequence[Sequence[int]]) -> list[int]:
    # Of two middle ones the larger: the mean of an operator that one seed kept and another
    # removed is a width that no seed has.
    return [statistics.median_high(column) for column in zip(*rows, strict=True)]


def _where(axes: Sequence[Extent]) -> str:
    """The layers of some axes, neighbours drawn together: 0, 3–5."""
    if any(axis.depth is None for axis in axes):
        return "yes"
    return layer_list([axis.depth for axis in axes if axis.depth is not None])


def layer_list(depths: Sequence[int]) -> str:
    if not depths:
        return ""
    breaks = [i for i, (a, b) in enumerate(pairwise(depths), start=1) if b > a + 1]
    parts = [depths[a:b] for a, b in pairwise([0, *breaks, len(depths)])]
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _of_seeds(runs: Sequence[Run]) -> str:
    return f" Widths are medians of {len(runs)} seeds." if len(runs) > 1 else ""
