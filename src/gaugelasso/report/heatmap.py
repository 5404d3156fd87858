"""The saturation picture: one row per layer, one column per axis, colour for the share kept."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import ListedColormap, LogNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, NullLocator

from gaugelasso.report.figure import (
    DPI,
    FONT,
    INK,
    RED,
    SMALL,
    heading,
    new_figure,
    save,
    symbol,
)
from gaugelasso.report.run import AXIS_NAMES, END_AXES, LAYER_KINDS, Run
from gaugelasso.report.saturation import CEILING, COLLAPSED, Extent, extents

# The same scale for every run, so that pictures can be compared.
_LEAST = 0.01
SHARE_SCALE = LogNorm(_LEAST, 1.0, clip=True)
# Without the darkest end, where a frame would not be visible.
SHARE_COLORS = ListedColormap(matplotlib.colormaps["Blues"](np.linspace(0.02, 0.82, 256)))
_AROUND_PX, _ROW_PX, _TALLEST_PX, _INSET_PX = 360, 56, 2200, 4.5
_SMALLEST_TEXT = 5.0
REMOVED = "#efefef"
_COLLAPSED_MARK: dict[str, Any] = {"marker": "v", "color": INK, "linestyle": ""}


def draw_saturation(runs: Sequence[Run], path: Path | IO[bytes]) -> None:
    """Write the PNG for one run, or for the medians over several seeds of one condition."""
    found = extents(runs)
    layers = max(runs[0].layers, 3)  # a single layer still needs room for the labels
    body = min(layers * _ROW_PX, _TALLEST_PX)
    figure = new_figure(_AROUND_PX + body)
    left, right, bar = figure.subplots(1, 3, width_ratios=[len(LAYER_KINDS), len(END_AXES), 0.16])
    _draw_cells(left, [found[kind] for kind in LAYER_KINDS], runs[0].layers, body)
    left.set_ylabel("layer", fontsize=SMALL, color=INK)
    every = math.ceil(runs[0].layers / 40)
    left.yaxis.set_major_locator(FixedLocator(range(0, runs[0].layers, every)))
    _draw_cells(right, [found[kind] for kind in END_AXES], 1, body)
    right.set_yticks([])
    for axes, kinds in ((left, LAYER_KINDS), (right, tuple(END_AXES))):
        labels = ["\n".join([symbol(kind), *AXIS_NAMES[kind].split()]) for kind in kinds]
        axes.set_xticks(range(len(kinds)), labels=labels)
    _draw_key(figure, bar, found)
    which = " (medians)" if len(runs) > 1 else ""
    title = f"{heading(runs)}: share of the initial width kept, in %{which}"
    figure.suptitle(title, fontsize=FONT + 1, color=INK, parse_math=False)
    save(figure, path)


def _draw_cells(axes: Axes, columns: Sequence[Sequence[Extent]], rows: int, height_px: int) -> None:
    """A block of cells, one column per axis kind; axes of the whole network have one row."""
    row_px = height_px / rows
    size = min(SMALL, 0.55 * row_px * 72 / DPI)
    inset = _INSET_PX / row_px
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.tick_params(labelsize=SMALL, colors=INK, length=0, top=False, labeltop=True,
                     bottom=False, labelbottom=False)  # fmt: skip
    for side in axes.spines.values():
        side.set_visible(False)
    cells = [(x, axis.depth or 0, axis) for x, column in enumerate(columns) for axis in column]
    faces = np.ones((rows, len(columns), 4))  # white: the layer never had this axis
    for x, y, axis in cells:
        faces[y, x] = to_rgba(REMOVED) if axis.removed else SHARE_COLORS(SHARE_SCALE(axis.share))
    # Cell edges are given because the height of a single row cannot be inferred.
    across, down = np.arange(len(columns) + 1) - 0.5, np.arange(rows + 1) - 0.5
    axes.pcolormesh(across, down, faces, edgecolor="white", linewidth=0.8)
    # Inside the cell, so that the frames of neighbours do not overlap.
    frames = [
        Rectangle((x - 0.475, y - 0.5 + inset), 0.95, 1 - 2 * inset)
        for x, y, axis in cells
        if axis.at_ceiling
    ]
    axes.add_collection(PatchCollection(frames, facecolor="none", edgecolor=RED, linewidth=1.5))
    removed = [(x, y) for x, y, axis in cells if axis.removed]
    if removed:
        axes.plot(*zip(*removed, strict=True), marker="x", color=INK, linestyle="",
                  markersize=0.7 * size, markeredgewidth=1.2)  # fmt: skip
    # Beside the number in the cell.
    collapsed = [(x + 0.36, y) for x, y, axis in cells if axis.collapsed and not axis.removed]
    if collapsed:
        axes.plot(*zip(*collapsed, strict=True), **_COLLAPSED_MARK, markersize=0.6 * size)
    for x, y, axis in cells if size >= _SMALLEST_TEXT else ():
        if not axis.removed:
            text = f"{100 * axis.share:.0f}" if axis.share >= 0.005 else "<1"
            color = "white" if SHARE_SCALE(axis.share) > 0.68 else INK
            axes.text(x, y, text, ha="center", va="center", fontsize=size, color=color)


def _draw_key(figure: Figure, bar: Axes, found: dict[str, list[Extent]]) -> None:
    key = figure.colorbar(ScalarMappable(SHARE_SCALE, SHARE_COLORS), cax=bar)
    ticks = [0.01, 0.03, 0.1, 0.3, 1.0]
    key.set_ticks(ticks, labels=[f"{tick:.0%}" for tick in ticks])
    key.ax.yaxis.set_minor_locator(NullLocator())
    key.ax.tick_params(labelsize=SMALL, colors=INK, length=2.5, width=0.6)
    key.outline.set_visible(False)
    axes = [axis for column in found.values() for axis in column]
    handles: list[Patch | Line2D] = []
    if any(axis.at_ceiling for axis in axes):
        handles.append(Patch(facecolor="white", edgecolor=RED, linewidth=1.5,
                             label=f"at its ceiling: {CEILING:.0%} or more kept"))  # fmt: skip
    if any(axis.collapsed and not axis.removed for axis in axes):
        handles.append(Line2D([], [], **_COLLAPSED_MARK, markersize=0.6 * SMALL,
                              label=f"collapsed: {COLLAPSED:.0%} or less kept"))  # fmt: skip
    if any(axis.removed for axis in axes):
        handles.append(Line2D([], [], color=INK, marker="x", linestyle="", markeredgewidth=1.2,
                              label="operator removed"))  # fmt: skip
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False,
                      fontsize=SMALL, labelcolor=INK)  # fmt: skip
