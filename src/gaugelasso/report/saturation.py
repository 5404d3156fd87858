"""Saturation: how much of its initial width every axis kept, and which axes are at their ceiling.

An axis at its ceiling was binding: it may need a larger initial width. One that collapsed was
larger than the task requires. Over several seeds every width is the median.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gaugelasso.report.formats import DASH, width_range
from gaugelasso.report.layout import Table
from gaugelasso.report.run import AXIS_NAMES, END_AXES, LAYER_KINDS, Run

CEILING = 0.9
COLLAPSED = 0.1
_CEILING_MARK, _COLLAPSED_MARK = "▲", "▼"


@dataclass(frozen=True)
class Extent:
    """Initial and final width of one axis; `depth` is None if the network has it once."""

    kind: str
    depth: int | None
    initial: int
    final: int

    @property
    def share(self) -> float:
        return self.final / self.initial

    @property
    def removed(self) -> bool:
        """Removed with its operator, in most seeds."""
        return self.final == 0

    @property
    def at_ceiling(self) -> bool:
        return self.share >= CEILING

    @property
    def collapsed(self) -> bool:
        return self.share <= COLLAPSED


def extents(runs: Sequence[Run]) -> dict[str, list[Extent]]:
    """Axis kind -> its axes by depth; layers that never had the operator are skipped.

    Nothing is known of the kinds of a model of the user: there each axis is one.
    """
    if runs[0].own_model:
        return _ends(runs, {axis: axis for run in runs for axis in run.initial["widths"]})
    found = {}
    for kind in LAYER_KINDS:
        initial = _medians([run.depth_widths(kind, 0) for run in runs])
        final = _medians([run.depth_widths(kind, run.last_step) for run in runs])
        pairs = enumerate(zip(initial, final, strict=True))
        found[kind] = [Extent(kind, depth, first, last) for depth, (first, last) in pairs if first]
    return found | _ends(runs, END_AXES)


def _ends(runs: Sequence[Run], axes: Mapping[str, str]) -> dict[str, list[Extent]]:
    """Kind -> its only axis, from kind -> name of that axis."""
    found = {}
    for kind, axis in axes.items():
        ends = [[run.initial["widths"].get(axis, 0), run.widths_at(run.last_step).get(axis, 0)]
                for run in runs]  # fmt: skip
        first, last = _medians(ends)
        found[kind] = [Extent(kind, None, first, last)] if first else []
    return found


def saturation_table(runs: Sequence[Run]) -> Table:
    """One row per axis kind: share kept, and the layers where it is at its ceiling or collapsed."""
    rows = []
    for kind, axes in extents(runs).items():
        if not axes:
            continue
        alive = [axis for axis in axes if not axis.removed]
        shares = [axis.share for axis in alive]
        rows.append([
            kind, AXIS_NAMES.get(kind, ""), width_range([axis.initial for axis in axes]),
            width_range([axis.final for axis in alive]) if alive else DASH,
            f"{statistics.median(shares):.0%}" if shares else DASH,
            _layers([axis for axis in alive if axis.at_ceiling]),
            _layers([axis for axis in alive if axis.collapsed]),
            _layers([axis for axis in axes if axis.removed]),
        ])  # fmt: skip
    note = f"Ceiling: at least {CEILING:.0%} of the initial width is kept. Collapsed: at most "
    note += f"{COLLAPSED:.0%}. Final: the smallest and the largest width in the layers that are "
    note += f"left. Kept: the median of their shares. Layers count from 0.{_of_seeds(runs)}"
    headers = ["axis", "", "initial", "final", "kept", "layers at their ceiling",
               "layers collapsed", "layers removed"]  # fmt: skip
    return Table("Saturation", headers, rows, note, left=(0, 1, 5, 6, 7))


def shares_table(runs: Sequence[Run]) -> Table:
    """Final width and share kept, of every axis in every layer."""
    found = {kind: {axis.depth: axis for axis in axes} for kind, axes in extents(runs).items()}
    rows = [
        [str(depth), *(_cell(found[kind].get(depth)) for kind in LAYER_KINDS)]
        for depth in range(runs[0].layers)
    ]
    initial = ({axis.initial for axis in found[kind].values()} for kind in LAYER_KINDS)
    rows.append(["initial", *(width_range(sorted(ws)) if ws else "" for ws in initial)])
    ends = [f"{kind} {_cell(axis)}" for kind in END_AXES for axis in found[kind].values()]
    note = f"{'; '.join(ends)}. {_CEILING_MARK} at its ceiling, {_COLLAPSED_MARK} collapsed, "
    note += f"{DASH} operator removed.{_of_seeds(runs)}"
    return Table("Widths kept, layer by layer", ["layer", *LAYER_KINDS], rows, note, foot=1)


def _cell(axis: Extent | None) -> str:
    if axis is None:
        return ""
    if axis.removed:
        return DASH
    mark = ""
    if axis.at_ceiling:
        mark = f" {_CEILING_MARK}"
    elif axis.collapsed:
        mark = f" {_COLLAPSED_MARK}"
    return f"{axis.final:,} ({axis.share:.0%}){mark}"


def _medians(rows: Sequence[Sequence[int]]) -> list[int]:
    # The larger of two middle values: if one seed kept an operator and another removed it, their
    # mean is a width that no seed has.
    return [statistics.median_high(column) for column in zip(*rows, strict=True)]


def _layers(axes: Sequence[Extent]) -> str:
    """The layers of some axes, or "yes" for an axis that the network has once."""
    if any(axis.depth is None for axis in axes):
        return "yes"
    return layer_list([axis.depth for axis in axes if axis.depth is not None])


def layer_list(depths: Sequence[int]) -> str:
    """Layer numbers with adjacent ones joined: 0, 3–5."""
    if not depths:
        return ""
    breaks = [i for i, (a, b) in enumerate(pairwise(depths), start=1) if b > a + 1]
    parts = [depths[a:b] for a, b in pairwise([0, *breaks, len(depths)])]
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _of_seeds(runs: Sequence[Run]) -> str:
    return f" Widths are medians of {len(runs)} {runs[0].told_by}s." if len(runs) > 1 else ""
