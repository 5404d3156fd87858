"""The picture of a comparison: the work of each arm against its error or metric."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter

from gaugelasso.report.arms import metric_name
from gaugelasso.report.data import Condition
from gaugelasso.report.figure import (
    BLUE,
    FONT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    RED,
    SMALL,
    log_axis,
    new_figure,
    round_ticks,
    save,
    style_axes,
    to_ascii,
)  # fmt: skip
from gaugelasso.report.formats import is_accuracy, short
from gaugelasso.report.outcome import outcome
from gaugelasso.runs.units import unit

_HEIGHT_PX = 1100
# The palette of Okabe and Ito without its yellow, which is hard to see on white, plus a brown.
_COLORS = (BLUE, RED, GREEN, ORANGE, INK, "#56B4E9", "#CC79A7", "#7A4A21", GREY)
# Not as many as colours, so that a repeated colour comes with another shape.
_SHAPES = "os^DvP<X>p"


def draw_tradeoff(arms: Sequence[Condition], path: Path | IO[bytes]) -> None:
    """Write the PNG: error or metric against work per token.

    Small marks are the seeds of an arm, a large mark is their mean.
    """
    figure = new_figure(_HEIGHT_PX)
    axes = figure.subplots()
    name = metric_name(arms)
    error = is_accuracy(name)
    style_axes(axes, f"{_unit(arms)} (accounting: {_accountings(arms)})")
    y_label = f"error (1 - {to_ascii(name)})" if error else to_ascii(name)
    axes.set_ylabel(y_label, fontsize=SMALL, color=INK, parse_math=False)
    points = [_points(arm, error) for arm in arms]
    work = [x for arm in points for x, _ in arm]
    if work:
        log_axis(axes, min(work) / 1.15, max(work) * 1.15, which="x")
    floor = _error_axis(axes, [y for arm in points for _, y in arm]) if error else -math.inf
    for index, (arm, seeds) in enumerate(zip(arms, points, strict=True)):
        color, shape = _COLORS[index % len(_COLORS)], _SHAPES[index % len(_SHAPES)]
        # Matplotlib leaves labels that begin with an underscore out of the legend.
        label = " " + to_ascii(arm.name).replace("$", r"\$")
        xs, ys = [x for x, _ in seeds], [y for _, y in seeds]
        middle = ([statistics.fmean(xs)], [statistics.fmean(ys)]) if seeds else ([], [])
        for x, y, size, alpha, text in ((xs, ys, 6, 0.55, ""), (*middle, 11, 1.0, label)):
            axes.plot(
                x, [max(value, floor) for value in y], shape, color=color, alpha=alpha,
                markersize=size, markeredgecolor="white", markeredgewidth=0.7, clip_on=False,
                zorder=2 + alpha, label=text or None,
            )  # fmt: skip
    figure.legend(loc="outside right upper", frameon=False, fontsize=SMALL, labelspacing=0.9)
    first = arms[0].runs[0]
    title = f"{first.task}: small marks are seeds, large marks are means of an arm"
    figure.suptitle(to_ascii(title), fontsize=FONT + 1, color=INK, parse_math=False)
    save(figure, path)


def _unit(arms: Sequence[Condition]) -> str:
    units = {unit(run.accounting) for arm in arms for run in arm.runs}
    return units.pop() if len(units) == 1 else "cost"


def _accountings(arms: Sequence[Condition]) -> str:
    return "; ".join(dict.fromkeys(run.accounting for arm in arms for run in arm.runs))


def _points(arm: Condition, error: bool) -> list[tuple[float, float]]:
    """(work, error or metric) of every seed that has both."""
    ends = [outcome(run) for run in arm.runs]
    return [
        (end.fma_final, 1 - end.metric if error else end.metric)
        for end in ends
        if end.metric is not None and math.isfinite(end.metric)
    ]


def _error_axis(axes: Axes, errors: Sequence[float]) -> float:
    """A log axis of errors with a place for zero at the bottom; returns that place."""
    positive = [value for value in errors if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    top = max(high, min(1.4 * high, 1.0))  # an error rate ends at one
    if len(positive) == len(errors):
        log_axis(axes, low / 1.4, top)
        return low
    floor = low / 4
    log_axis(axes, floor / 1.4, top)
    ticks = [floor, *round_ticks(low / 1.4, top)]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: "0" if value == floor else short(value))
    )
    axes.axhline(floor, color=GREY, linestyle=":", linewidth=0.9, zorder=1)
    return floor
