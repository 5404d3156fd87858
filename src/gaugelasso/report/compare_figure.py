"""The picture of a comparison: loss and metric against FMA, and against milliseconds."""

import statistics
import textwrap
from pathlib import Path
from typing import IO

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from gaugelasso.report.compare import Comparison
from gaugelasso.report.figure import (
    COLORS,
    FONT,
    INK,
    MARKERS,
    SMALL,
    fit_axis,
    new_figure,
    save,
    style_axes,
    to_ascii,
)
from gaugelasso.report.formats import is_accuracy, metric_format
from gaugelasso.report.outcome import loss_name

_HEIGHT_PX = 800  # of a row of panels
_LEGEND_CHARS = 30


def draw_comparison(found: Comparison, path: Path | IO[bytes]) -> None:
    """Write the PNG. Small marks are seeds, large ones means, with bars of one deviation."""
    first, metric = found.runs[0], found.metric_name
    of_loss = metric is None or all(run.metric_is_loss for run in found.runs)
    quality = ["loss"] if of_loss else ["loss", "metric"]
    costs = ["fma", "ms"] if found.ms_of else ["fma"]
    sheet = new_figure(_HEIGHT_PX * len(quality))
    grid = sheet.subplots(len(quality), len(costs), squeeze=False)
    labels = {
        "fma": f"FMA per token (accounting: {to_ascii(found.accounting)})",
        "ms": to_ascii(found.ms_of).split(" (")[0],
        "loss": loss_name(found.runs),
        "metric": to_ascii(metric or ""),
    }
    for row, good in enumerate(quality):
        for column, cost in enumerate(costs):
            axes = grid[row][column]
            style_axes(axes, labels[cost])
            # A metric's name may hold signs of mathematics.
            axes.set_ylabel(labels[good], fontsize=SMALL, color=INK, parse_math=False)
            _draw_methods(axes, found, cost, good)
            if good == "metric" and metric:
                form = metric_format(metric)
                axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _, form=form: form(v)))
    handles, names = grid[0][0].get_legend_handles_labels()
    sheet.legend(handles, names, loc="outside right upper", frameon=False, fontsize=SMALL,
                 labelcolor=INK)  # fmt: skip
    number = len(found.methods)
    title = f"{first.task}, {number} method{'' if number == 1 else 's'}, {len(found.runs)} runs"
    sheet.suptitle(to_ascii(title), fontsize=FONT + 1, color=INK, parse_math=False)
    save(sheet, path)


def _draw_methods(axes: Axes, found: Comparison, cost: str, good: str) -> None:
    every: list[tuple[float, float]] = []
    for number, name in enumerate(found.methods):
        pairs = zip(found.values(name, cost), found.values(name, good), strict=True)
        places = [(x, y) for x, y in pairs if x is not None and y is not None]
        every += places
        color = COLORS[number % len(COLORS)]
        marker = MARKERS[number % len(MARKERS)]
        xs, ys = [x for x, _ in places], [y for _, y in places]
        if len(places) > 1:
            axes.plot(xs, ys, marker, color=color, markersize=4, alpha=0.5, markeredgewidth=0)
        missed = f" ({text})" if (text := found.missed(name)) else ""
        label = textwrap.fill(to_ascii(name + missed), _LEGEND_CHARS).replace("$", r"\$")
        if places:
            wide = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in (xs, ys)]
            axes.errorbar(
                statistics.fmean(xs), statistics.fmean(ys), wide[1], wide[0], fmt=marker,
                color=color, markersize=7, markeredgecolor="white", markeredgewidth=0.7,
                elinewidth=1.0, label=label, zorder=3,
            )  # fmt: skip
        else:
            axes.plot([], [], marker, color=color, label=f"{label} (no finite figure)")
    if every:
        fit_axis(axes, "x", [x for x, _ in every])
        heights = [y for _, y in every]
        if good == "loss":
            fit_axis(axes, "y", heights)
        elif is_accuracy(found.runs[0].metric_name):
            air = max(0.06 * (1 - min(heights)), 0.0005)
            axes.set_ylim(min(heights) - 2 * air, 1 + air)
