"""The structural profile: what was left of every axis at every depth, and when.

Seven panels of extent against depth, one line a snapshot; an eighth against training
step with the residual sites, the two ends of the network and the work per token.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import IO

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator

from gaugelasso.report.data import AXIS_WORDS, END_AXES, LAYER_KINDS, Run
from gaugelasso.report.figure import (
    BLUE,
    FONT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    SMALL,
    cooldown_key,
    draw_spread,
    dress,
    hatched,
    heading,
    legend_above,
    log_axis,
    mark_cooldown,
    new_figure,
    round_ticks,
    save,
    spread,
    step_axis,
    symbol,
    twin,
)  # fmt: skip

_HEIGHT_PX = 1120
_SNAPSHOTS = 7
# Axis, colour, line width: D is wide to show behind an end that is as large.
_ENDS = (
    ("D", BLUE, 2.6),
    ("d_e", GREEN, 1.3),
    ("d_c", ORANGE, 1.3),
)


def draw_profile(runs: Sequence[Run], path: Path | IO[bytes]) -> None:
    """Write the eight-panel PNG for one run, or for several seeds of one condition.

    With several runs a line is the median over seeds and the hatched band their full
    range at the end. An operator counts as removed where its median extent is 0.
    """
    steps = snapshots(runs)
    colors = _colors(len(steps))
    figure = new_figure(_HEIGHT_PX)
    grid = figure.add_gridspec(3, 4, height_ratios=[1, 1, 0.055])
    crossed = False
    for index, kind in enumerate(LAYER_KINDS):
        axes = figure.add_subplot(grid[divmod(index, 4)])
        crossed |= _draw_kind(axes, runs, kind, steps, colors)
        if index % 4 == 0:
            axes.set_ylabel("surviving channels", fontsize=SMALL)
    _draw_totals(figure.add_subplot(grid[1, 3]), runs)
    _draw_key(figure, grid, runs, steps, colors, crossed)
    title = heading(runs) + _untouched(runs)
    figure.suptitle(title, fontsize=FONT + 1, color=INK, parse_math=False)
    save(figure, path)


def snapshots(runs: Sequence[Run], most: int = _SNAPSHOTS) -> list[int]:
    """Steps to show: start, end, and between them equal ratios of work per token.

    Compression is fast here and slow there; equal ratios give each line as much change.
    """
    grid, fma, _, _ = spread([run.fma_trajectory() for run in runs], steps=True)
    last = max(run.last_step for run in runs)
    if fma[-1] >= fma[0]:
        return sorted({0, last})
    levels = np.geomspace(fma[0], fma[-1], most)[1:-1]
    return sorted({0, last} | {int(grid[np.argmax(fma <= level)]) for level in levels})


def _untouched(runs: Sequence[Run]) -> str:
    """Said where every line is flat, lest a reader look for what is not there."""
    if any(event["widths"] != run.initial["widths"] for run in runs for event in run.events):
        return ""
    going = any(run.summary is None for run in runs)
    return ": nothing was removed" + (" yet" if going else "")


def _colors(count: int) -> list[str]:
    # Light to dark without the yellow end, which white paper swallows.
    shades = matplotlib.colormaps["viridis"](np.linspace(0.88, 0.0, max(count, 2)))
    return [to_hex(shade) for shade in shades[-count:]]


def _draw_kind(
    axes: Axes, runs: Sequence[Run], kind: str, steps: list[int], colors: list[str]
) -> bool:
    """One panel: extent of one kind of axis against depth. Whether a cross tells of a removal."""
    dress(axes, "layer", title=f"{symbol(kind)}  {AXIS_WORDS[kind]}")
    depth = np.arange(runs[0].layers)
    axes.set_xlim(-0.4, len(depth) - 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    # extents[snapshot, run, depth]
    extents = np.array([[run.depth_widths(kind, step) for run in runs] for step in steps])
    if not extents.any():
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not in this model", transform=axes.transAxes, ha="center",
                  fontsize=SMALL, color=GREY)  # fmt: skip
        return False
    medians = np.median(extents, axis=1)
    # A layer that never had this operator is no removal.
    removed = (medians < 1) & (medians[0] >= 1)
    floor = _extent_axis(axes, extents, strip=bool(removed.any() or (extents[-1] < 1).any()))
    if len(runs) > 1:
        _draw_range(axes, extents[-1], floor, colors[-1])
    small = len(depth) > 12
    for index, (median, color) in enumerate(zip(medians, colors, strict=True)):
        line = np.where(median < 1, np.nan, median)
        last = index == len(steps) - 1
        axes.plot(depth, line, color=color, linewidth=2.0 if last else 1.2, marker="o",
                  markersize=(1.6 if small else 3.2) + last, zorder=3 + index)  # fmt: skip
    # The colour of a cross says when the operator went: the first snapshot without it.
    for layer in np.flatnonzero(removed[-1]):
        when = int(np.argmax(removed[:, layer]))
        axes.plot(layer, floor, marker="x", color=colors[when], markersize=4.5 if small else 6,
                  markeredgewidth=1.6, linestyle="", zorder=20)  # fmt: skip
    return bool(removed[-1].any())


def _extent_axis(axes: Axes, extents: np.ndarray, strip: bool) -> float:
    """Scale a panel's y axis; returns where "removed" lies: a strip below the least extent."""
    high = float(extents.max())
    low = 2.0 ** np.floor(np.log2(min(float(extents[extents > 0].min()), high / 4)))
    low = max(low, 1.0)
    floor = low / 2
    log_axis(axes, floor / 1.5 if strip else low / 1.25, high * 1.35, base=2)
    if strip:
        axes.axhspan(floor / 1.5, floor * 1.42, facecolor="#efefef", linewidth=0, zorder=0.5)
        ticks = round_ticks(low, high * 1.35, base=2)
        axes.yaxis.set_major_locator(FixedLocator([floor, *ticks]))
        axes.yaxis.set_major_formatter(FixedFormatter(["0", *(f"{t:,.0f}" for t in ticks)]))
    return floor


def _draw_range(axes: Axes, extents: np.ndarray, floor: float, color: str) -> None:
    """The range over seeds: a band over neighbouring layers that any seed kept."""
    low, high = np.maximum(extents.min(axis=0), floor), extents.max(axis=0)
    kept = np.flatnonzero(high)
    for part in np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1):
        # Half a shoulder at both ends, or a lone layer would have no width to fill.
        x = np.concatenate([part[:1] - 0.15, part, part[-1:] + 0.15])
        ends = np.concatenate([part[:1], part, part[-1:]])
        axes.fill_between(x, low[ends], high[ends], zorder=1.5, **hatched(color))


def _draw_totals(axes: Axes, runs: Sequence[Run]) -> None:
    """The eighth panel: sites and the network's two ends on the left, work on the right."""
    dress(axes, "training step")
    extents = []
    for kind, color, width in _ENDS:
        band = spread([run.axis_trajectory(END_AXES[kind]) for run in runs], steps=True)
        if band[3].any():
            draw_spread(axes, band, color, symbol(kind), steps=True, width=width)
            extents += [band[2].min(), band[3].max()]
    high = max(extents)
    low = max(min(*extents, high / 8), 1.0)
    log_axis(axes, low / 1.25, high * 1.35, base=2)
    right = twin(axes, "FMA per token", INK)
    work = spread([run.fma_trajectory() for run in runs], steps=True)
    draw_spread(right, work, INK, "FMA", steps=True)
    right.lines[-1].set_linestyle((0, (4, 1.5)))
    least = max(float(work[2].min()), 1.0)
    log_axis(right, min(least, work[3].max() / 8) / 1.25, work[3].max() * 1.35)
    mark_cooldown(axes, runs)
    step_axis(axes, max(run.last_step for run in runs))
    legend_above(axes, right)


def _draw_key(
    figure: Figure, grid: "matplotlib.gridspec.GridSpec", runs: Sequence[Run], steps: list[int],
    colors: list[str], crossed: bool,
) -> None:  # fmt: skip
    """The colour bar of snapshots and what cross and hatching mean."""
    bar = figure.add_subplot(grid[2, :2])
    count = len(colors)
    scale = ScalarMappable(BoundaryNorm(np.arange(count + 1), count), ListedColormap(colors))
    key = figure.colorbar(scale, cax=bar, orientation="horizontal", drawedges=False)
    key.set_ticks([index + 0.5 for index in range(count)], labels=[f"{s:,}" for s in steps])
    key.minorticks_off()
    key.set_label("training step of the snapshot", fontsize=SMALL, color=INK)
    key.ax.tick_params(labelsize=SMALL, colors=INK, length=0)
    key.outline.set_visible(False)
    dark = colors[-1]
    handles: list[Line2D | Patch] = []
    if crossed:
        handles.append(
            Line2D([], [], color=INK, marker="x", linestyle="", markeredgewidth=1.6,
                   label="operator removed (colour: when)")
        )  # fmt: skip
    handles += cooldown_key(runs)
    if len(runs) > 1:
        handles.insert(0, Line2D([], [], color=dark, linewidth=2, label="median over seeds"))
        handles.insert(1, Patch(label="range over seeds at the end", **hatched(dark)))
    legend = figure.add_subplot(grid[2, 2:])
    legend.axis("off")
    legend.legend(handles=handles, loc="center", ncols=2, frameon=False, fontsize=SMALL)
