"""The structural profile: the width of every axis at every depth, at several training steps.

Seven panels show width against depth, one line per snapshot. The eighth shows the residual sites,
the embedding, the classifier and the work per token against training step.
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
    style_axes,
    symbol,
    twin,
)  # fmt: skip
from gaugelasso.report.run import AXIS_NAMES, END_AXES, LAYER_KINDS, Run
from gaugelasso.runs.units import noun, unit

_HEIGHT_PX = 1120
_SNAPSHOTS = 7
# Axis, colour, line width: D is thick, to stay visible behind a curve of the same value.
_ENDS = (
    ("D", BLUE, 2.6),
    ("d_e", GREEN, 1.3),
    ("d_c", ORANGE, 1.3),
)


def draw_profile(runs: Sequence[Run], path: Path | IO[bytes]) -> None:
    """Write the eight-panel PNG for one run, or for several seeds of one condition.

    With several runs a line is the median over seeds, and the hatched band is their full
    range at the end. An operator counts as removed if its median width is 0.
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
    title = heading(runs) + _nothing_removed(runs)
    figure.suptitle(title, fontsize=FONT + 1, color=INK, parse_math=False)
    save(figure, path)


def snapshots(runs: Sequence[Run], most: int = _SNAPSHOTS) -> list[int]:
    """Steps to show: start, end, and between them equal ratios of work per token.

    The speed of compression varies; with equal ratios, all lines are about equally far apart.
    """
    grid, fma, _, _ = spread([run.fma_trajectory() for run in runs], steps=True)
    last = max(run.last_step for run in runs)
    if fma[-1] >= fma[0]:
        return sorted({0, last})
    levels = np.geomspace(fma[0], fma[-1], most)[1:-1]
    return sorted({0, last} | {int(grid[np.argmax(fma <= level)]) for level in levels})


def _nothing_removed(runs: Sequence[Run]) -> str:
    """A note for the title if no width has changed: all lines are flat then."""
    if any(event["widths"] != run.initial["widths"] for run in runs for event in run.events):
        return ""
    unfinished = any(run.summary is None for run in runs)
    return ": nothing was removed" + (" yet" if unfinished else "")


def _colors(count: int) -> list[str]:
    # Light to dark, without the yellow end, which is hard to see on white.
    shades = matplotlib.colormaps["viridis"](np.linspace(0.88, 0.0, max(count, 2)))
    return [to_hex(shade) for shade in shades[-count:]]


def _draw_kind(
    axes: Axes, runs: Sequence[Run], kind: str, steps: list[int], colors: list[str]
) -> bool:
    """One panel: the width of one kind of axis against depth.

    Returns whether it marks a removed operator with a cross.
    """
    style_axes(axes, "layer", title=f"{symbol(kind)}  {AXIS_NAMES[kind]}")
    depth = np.arange(runs[0].layers)
    axes.set_xlim(-0.4, len(depth) - 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    # widths[snapshot, run, depth]
    widths = np.array([[run.depth_widths(kind, step) for run in runs] for step in steps])
    if not widths.any():
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not in this model", transform=axes.transAxes, ha="center",
                  fontsize=SMALL, color=GREY)  # fmt: skip
        return False
    medians = np.median(widths, axis=1)
    # A layer that never had this operator did not lose it.
    removed = (medians < 1) & (medians[0] >= 1)
    floor = _width_axis(axes, widths, strip=bool(removed.any() or (widths[-1] < 1).any()))
    if len(runs) > 1:
        _draw_range(axes, widths[-1], floor, colors[-1])
    small = len(depth) > 12
    for index, (median, color) in enumerate(zip(medians, colors, strict=True)):
        line = np.where(median < 1, np.nan, median)
        last = index == len(steps) - 1
        axes.plot(depth, line, color=color, linewidth=2.0 if last else 1.2, marker="o",
                  markersize=(1.6 if small else 3.2) + last, zorder=3 + index)  # fmt: skip
    # The colour of a cross is that of the first snapshot without the operator. One that a return
    # to an earlier state brought back counts as removed when it went for good.
    for layer in np.flatnonzero(removed[-1]):
        when = int(np.flatnonzero(~removed[:, layer])[-1]) + 1
        axes.plot(layer, floor, marker="x", color=colors[when], markersize=4.5 if small else 6,
                  markeredgewidth=1.6, linestyle="", zorder=20)  # fmt: skip
    return bool(removed[-1].any())


def _width_axis(axes: Axes, widths: np.ndarray, strip: bool) -> float:
    """Scales a panel's y axis. Returns the position of width 0, below the smallest width."""
    high = float(widths.max())
    low = 2.0 ** np.floor(np.log2(min(float(widths[widths > 0].min()), high / 4)))
    low = max(low, 1.0)
    floor = low / 2
    log_axis(axes, floor / 1.5 if strip else low / 1.25, high * 1.35, base=2)
    if strip:
        axes.axhspan(floor / 1.5, floor * 1.42, facecolor="#efefef", linewidth=0, zorder=0.5)
        ticks = round_ticks(low, high * 1.35, base=2)
        axes.yaxis.set_major_locator(FixedLocator([floor, *ticks]))
        axes.yaxis.set_major_formatter(FixedFormatter(["0", *(f"{t:,.0f}" for t in ticks)]))
    return floor


def _draw_range(axes: Axes, widths: np.ndarray, floor: float, color: str) -> None:
    """The range over seeds: one band per group of adjacent layers that some seed kept."""
    low, high = np.maximum(widths.min(axis=0), floor), widths.max(axis=0)
    kept = np.flatnonzero(high)
    for part in np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1):
        # Extended at both ends, because a band over a single layer would have no area.
        x = np.concatenate([part[:1] - 0.15, part, part[-1:] + 0.15])
        ends = np.concatenate([part[:1], part, part[-1:]])
        axes.fill_between(x, low[ends], high[ends], zorder=1.5, **hatched(color))


def _draw_totals(axes: Axes, runs: Sequence[Run]) -> None:
    """The eighth panel: D, d_e and d_c on the left scale, work on the right scale."""
    style_axes(axes, "training step")
    bounds = []
    for kind, color, width in _ENDS:
        band = spread([run.axis_trajectory(END_AXES[kind]) for run in runs], steps=True)
        if band[3].any():
            draw_spread(axes, band, color, symbol(kind), steps=True, width=width)
            bounds += [band[2].min(), band[3].max()]
    high = max(bounds)
    low = max(min(*bounds, high / 8), 1.0)
    log_axis(axes, low / 1.25, high * 1.35, base=2)
    right = twin(axes, unit(runs[0].accounting), INK)
    work = spread([run.fma_trajectory() for run in runs], steps=True)
    draw_spread(right, work, INK, noun(runs[0].accounting), steps=True)
    right.lines[-1].set_linestyle((0, (4, 1.5)))
    least = max(float(work[2].min()), min(1.0, work[3].max() / 1000))
    log_axis(right, min(least, work[3].max() / 8) / 1.25, work[3].max() * 1.35)
    mark_cooldown(axes, runs)
    step_axis(axes, max(run.last_step for run in runs))
    legend_above(axes, right)


def _draw_key(
    figure: Figure, grid: "matplotlib.gridspec.GridSpec", runs: Sequence[Run], steps: list[int],
    colors: list[str], crossed: bool,
) -> None:  # fmt: skip
    """The colour bar of the snapshots, and a legend for crosses and hatching."""
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
                   label="operator removed (by the step of its colour)")
        )  # fmt: skip
    handles += cooldown_key(runs)
    if len(runs) > 1:
        handles.insert(0, Line2D([], [], color=dark, linewidth=2, label="median over seeds"))
        handles.insert(1, Patch(label="range over seeds at the end", **hatched(dark)))
    legend = figure.add_subplot(grid[2, 2:])
    legend.axis("off")
    legend.legend(handles=handles, loc="center", ncols=2, frameon=False, fontsize=SMALL)
