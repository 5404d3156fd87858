"""The structural profile of a model of the user: the width of its axes against training step.

Nothing is known of the order or depth of its axes, so each is a row, widest first. The work per
token is in a second panel.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator

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
from gaugelasso.report.formats import count
from gaugelasso.report.heatmap import REMOVED, SHARE_COLORS, SHARE_SCALE
from gaugelasso.report.run import Run
from gaugelasso.runs.units import noun, unit

_AROUND_PX, _ROW_PX, _LEAST_PX = 240, 34, 800
_MOST_AXES, _NAME_CHARS = 40, 36


def draw_axes_profile(runs: Sequence[Run], path: Path | IO[bytes]) -> None:
    """Write the two-panel PNG: the share of each axis that is left, and work, against step.

    With several runs widths are medians over seeds; the band of the work is their range.
    """
    initial = runs[0].initial["widths"]
    widest = sorted(initial, key=lambda name: -initial[name])[:_MOST_AXES]
    figure = new_figure(max(_AROUND_PX + _ROW_PX * len(widest), _LEAST_PX))
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    some = (
        f" of the {len(widest)} widest of {len(initial)} axes" if len(initial) > len(widest) else ""
    )
    style_axes(left, "training step", title=f"share of channels left{some}: the darker, the more")
    _draw_rows(left, runs, {name: initial[name] for name in widest})
    _draw_work(right, runs)
    for axes in (left, right):
        mark_cooldown(axes, runs)
        step_axis(axes, max(run.last_step for run in runs))
    if handles := cooldown_key(runs):
        figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize=SMALL)
    figure.suptitle(heading(runs), fontsize=FONT + 1, color=INK, parse_math=False)
    save(figure, path)


def _draw_rows(axes: Axes, runs: Sequence[Run], initial: dict[str, int]) -> None:
    """A row for each axis: darker where more of it is left, grey where it is removed."""
    ends = []
    for row, (name, width) in enumerate(initial.items()):
        grid, widths, *_ = spread([run.axis_trajectory(name) for run in runs], steps=True)
        ends.append(f"{count(widths[-1])} of {count(width)}")
        if len(grid) > 1:  # else there was no step yet
            share = np.where(widths[:-1] < 1, np.nan, widths[:-1] / width)
            axes.pcolormesh(
                grid, [row - 0.42, row + 0.42], share[None], cmap=SHARE_COLORS, norm=SHARE_SCALE
            )
    axes.set_facecolor(REMOVED)
    axes.grid(visible=False)
    axes.set_ylim(len(initial) - 0.5, -0.5)
    places = FixedLocator(range(len(initial)))
    axes.yaxis.set_major_locator(places)
    axes.set_yticklabels([_shortened(to_ascii(name)) for name in initial], parse_math=False)
    right = axes.secondary_yaxis("right")
    right.yaxis.set_major_locator(places)
    right.set_yticklabels(ends)
    right.tick_params(labelsize=SMALL, colors=INK, length=0)


def _shortened(name: str) -> str:
    """The end of a long name, which tells axes apart."""
    return name if len(name) <= _NAME_CHARS else f"...{name[3 - _NAME_CHARS :]}"


def _draw_work(axes: Axes, runs: Sequence[Run]) -> None:
    style_axes(axes, "training step", title=unit(runs[0].accounting))
    work = spread([run.fma_trajectory() for run in runs], steps=True)
    draw_spread(axes, work, INK, noun(runs[0].accounting), steps=True)
    high = float(work[3].max())
    low = max(float(work[2].min()), min(1.0, high / 1000))
    log_axis(axes, min(low, high / 8) / 1.25, high * 1.35)
