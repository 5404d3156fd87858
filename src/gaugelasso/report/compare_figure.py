"""The picture of a comparison: loss and metric against FMA, and against milliseconds."""

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from gaugelasso.report.compare import Comparison
from gaugelasso.report.figure import (
    COLORS,
    FONT,
    GREY,
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
_SEED: dict[str, Any] = {"markersize": 4, "alpha": 0.5, "markeredgewidth": 0}
_MEAN: dict[str, Any] = {"markersize": 7, "markeredgewidth": 0.9}
_MISSED: dict[str, Any] = {"markersize": 4, "markeredgewidth": 0.9, "markerfacecolor": "white"}


def draw_comparison(found: Comparison, path: Path | IO[bytes]) -> None:
    """Write the PNG. Small marks are seeds, large ones means, with bars from least to greatest."""
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
    sheet.legend(handles=_mark_keys(found), loc="outside lower center", ncols=3, frameon=False,
                 fontsize=SMALL, labelcolor=INK)  # fmt: skip
    number = len(found.methods)
    title = f"{first.task}, {number} method{'' if number == 1 else 's'}, {len(found.runs)} runs"
    sheet.suptitle(to_ascii(title), fontsize=FONT + 1, color=INK, parse_math=False)
    save(sheet, path)


def _mark_keys(found: Comparison) -> list[Line2D]:
    """What small, large and empty marks are; colours and shapes are in the legend of methods."""
    seed = found.runs[0].told_by
    several = any(len(members) > 1 for members in found.methods.values())
    styles: list[tuple[str, dict[str, Any]]] = [
        *([(f"one {seed}", _SEED)] if several else []),
        (f"mean over {seed}s, bars from least to greatest" if several else f"one {seed}", _MEAN),
        *([("missed its target", _MISSED)] if any(map(found.missed, found.methods)) else []),
    ]
    return [
        Line2D([], [], color=GREY, marker="o", linestyle="", label=label, **style)
        for label, style in styles
    ]


def _draw_methods(axes: Axes, found: Comparison, cost: str, good: str) -> None:
    every: list[tuple[float, float]] = []
    for number, name in enumerate(found.methods):
        missing = [member.held is False for member in found.methods[name]]
        rows = zip(found.values(name, cost), found.values(name, good), missing, strict=True)
        places = [(x, y, missed) for x, y, missed in rows if x is not None and y is not None]
        color = COLORS[number % len(COLORS)]
        marker = MARKERS[number % len(MARKERS)]
        xs, ys = [x for x, _, _ in places], [y for _, y, _ in places]
        every += zip(xs, ys, strict=True)
        for style, empty in ((_SEED, False), (_MISSED, True)):
            some = [(x, y) for x, y, missed in places if missed is empty and len(places) > 1]
            axes.plot([x for x, _ in some], [y for _, y in some], marker, color=color, **style)
        share = f" ({text})" if (text := found.missed(name)) else ""
        label = textwrap.fill(to_ascii(name + share), _LEGEND_CHARS).replace("$", r"\$")
        if places:
            empty = all(missed for _, _, missed in places)
            axes.errorbar(
                statistics.fmean(xs), statistics.fmean(ys), _to_ends(ys), _to_ends(xs), fmt=marker,
                color=color, elinewidth=1.0, label=label, **_MEAN,
                markerfacecolor="white" if empty else color,
                markeredgecolor=color if empty else "white", zorder=3,
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


def _to_ends(values: Sequence[float]) -> list[list[float]]:
    """The lengths of a bar from the mean to the least and to the greatest value."""
    mean = statistics.fmean(values)  # of equal values it may be off by a rounding error
    return [[max(0.0, mean - min(values))], [max(0.0, max(values) - mean)]]
