"""The structural profile of a model of the user: the width of its axes against training step.

Nothing is known of the order or depth of its axes, so each is one line. The work per token is in
a second panel.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import IO

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from gaugelasso.report.figure import (
    FONT,
    INK,
    SMALL,
    cooldown_key,
    draw_spread,
    heading,
    log_axis,
    mark_cooldown,
    new_figure,
    save,
    spread,
    step_axis,
    style_axes,
    to_ascii,
)  # fmt: skip
from gaugelasso.report.run import Run
from gaugelasso.runs.units import noun, unit

_HEIGHT_PX = 800
_MOST_AXES = 12  # more lines cannot be told apart


def draw_axes_profile(runs: Sequence[Run], path: Path | IO[bytes]) -> None:
    """Write the two-panel PNG: widths of the widest axes, and work, against training step.

    With several runs a line is the median over seeds, and the hatched band is their range.
    """
    figure = new_figure(_HEIGHT_PX)
    left, right = figure.subplots(1, 2)
    initial = runs[0].initial["widths"]
    widest = sorted(initial, key=lambda name: -initial[name])[:_MOST_AXES]
    shown = f" ({len(widest)} widest of {len(initial)} axes)" if len(initial) > len(widest) else ""
    style_axes(left, "training step", title=f"surviving channels{shown}")
    shades = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.88, max(len(widest), 2)))
    for name, shade in zip(widest, shades, strict=False):
        grid, *widths = spread([run.axis_trajectory(name) for run in runs], steps=True)
        # A width of 0 has no place on a log scale; the line ends there.
        widths = [np.where(values < 1, np.nan, values) for values in widths]
        draw_spread(left, (grid, *widths), to_hex(shade), to_ascii(name), steps=True)
    log_axis(left, 0.8, max(initial.values()) * 1.35, base=2)
    left.legend(frameon=False, fontsize=SMALL)
    _draw_work(right, runs)
    for axes in (left, right):
        mark_cooldown(axes, runs)
        step_axis(axes, max(run.last_step for run in runs))
    if handles := cooldown_key(runs):
        figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize=SMALL)
    figure.suptitle(heading(runs), fontsize=FONT + 1, color=INK, parse_math=False)
    save(figure, path)


def _draw_work(axes: Axes, runs: Sequence[Run]) -> None:
    style_axes(axes, "training step", title=unit(runs[0].accounting))
    work = spread([run.fma_trajectory() for run in runs], steps=True)
    draw_spread(axes, work, INK, noun(runs[0].accounting), steps=True)
    high = float(work[3].max())
    low = max(float(work[2].min()), min(1.0, high / 1000))
    log_axis(axes, min(low, high / 8) / 1.25, high * 1.35)
