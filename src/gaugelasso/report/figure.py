"""What all pictures share: size, colours, axes, and the spread over seeds.

Works on Figure objects only: no pyplot, no rcParams, no global state.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from gaugelasso.report.formats import short
from gaugelasso.report.goal import goal
from gaugelasso.report.run import Run

DPI = 200
WIDTH_PX = 2000
# The palette of Okabe and Ito: distinct for every kind of colour vision, and in grey.
BLUE, RED, GREEN, ORANGE, INK = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#222222"
PINK, SKY, GREY = "#CC79A7", "#56B4E9", "#8a8a8a"
# Of conditions that are drawn together: first every colour, then the next marker.
COLORS, MARKERS = (BLUE, RED, GREEN, ORANGE, PINK, SKY, INK), "osD^v"
FONT, SMALL = 9.0, 8.0
_SHOWN = (1e-100, 1e100)  # on a log axis; what is beyond is outside of the picture

Curve = tuple[list[int], list[float]]


def new_figure(height_px: int) -> Figure:
    return Figure(
        figsize=(WIDTH_PX / DPI, height_px / DPI), dpi=DPI, facecolor="white", layout="constrained"
    )


def save(figure: Figure, path: Path | IO[bytes], metadata: Mapping[str, str] | None = None) -> None:
    """Write a PNG of exactly the figure's size."""
    # Figure.savefig would draw everything twice, the first time for the layout alone.
    FigureCanvasAgg(figure).print_png(path, metadata=metadata)


def style_axes(axes: Axes, x_label: str = "", y_label: str = "", title: str = "") -> None:
    axes.set_title(title, fontsize=FONT + 1, color=INK)
    axes.set_xlabel(x_label, fontsize=SMALL, color=INK)
    axes.set_ylabel(y_label, fontsize=SMALL, color=INK)
    axes.tick_params(labelsize=SMALL, colors=INK, length=2.5, width=0.6)
    axes.grid(visible=True, which="major", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_linewidth(0.6)
        side.set_color(GREY)


def twin(axes: Axes, label: str, color: str) -> Axes:
    """A second y axis on the right, in the colour of its curve."""
    right = axes.twinx()
    style_axes(right, y_label=label)
    right.grid(visible=False)
    right.yaxis.label.set_color(color)
    right.tick_params(axis="y", colors=color)
    return right


def step_axis(axes: Axes, last_step: int) -> None:
    axes.set_xlim(0, max(last_step, 1))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(_short_tick))


def log_axis(
    axes: Axes, low: float, high: float, base: int = 10, which: Literal["x", "y"] = "y"
) -> None:
    """A log axis over [low, high] with a few ticks at round numbers."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    # The limits first: a log scale would find its own, which may overflow.
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=base)
    axis.set_major_locator(FixedLocator(round_ticks(low, high, base)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(_short_tick if base == 10 else _integer_tick))


def fit_axis(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """A log axis with some air around the values."""
    # A loss may be negative, which a log axis cannot show; and limits may not overflow.
    if min(values) > 0:
        low, high = np.clip([min(values), max(values)], *_SHOWN)
        air = max((high / low) ** 0.06, 1.05)
        log_axis(axes, low / air, high * air, which=which)


def round_ticks(low: float, high: float, base: int = 10, most: int = 7) -> list[float]:
    """Powers of the base in [low, high]: at most `most`, evenly spaced from the greatest.

    In base 10, if these are fewer than three: 1-2-5 steps; if these are too: linear steps.
    """
    first, last = (math.floor(math.log(bound, base)) for bound in (low, high))
    powers = [float(base) ** exponent for exponent in range(first, last + 1)]
    inside = [power for power in powers if low <= power <= high]
    if len(inside) > most:
        return inside[:: -math.ceil(len(inside) / most)][::-1]
    if base == 10 and len(inside) < 3:
        inside = [m * p for p in powers for m in (1.0, 2.0, 5.0) if low <= m * p <= high]
        if len(inside) < 3:
            steps = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high)
            inside = [float(step) for step in steps if low <= step <= high]
    return inside


def _short_tick(value: float, _position: int = 0) -> str:
    return short(value)


def _integer_tick(value: float, _position: int = 0) -> str:
    return f"{value:,.0f}" if value >= 1 else ""


def mark_cooldown(axes: Axes, runs: Sequence[Run]) -> None:
    """Grey dashed lines at the steps where cooldown starts."""
    for start in sorted({run.cooldown_start for run in runs} - {None}, key=lambda s: s or 0):
        axes.axvline(float(start or 0), color=GREY, linestyle="--", linewidth=0.9, zorder=1)


def cooldown_key(runs: Sequence[Run]) -> list[Line2D]:
    """The legend entry for these lines; empty if there are none."""
    if all(run.cooldown_start is None for run in runs):
        return []
    return [Line2D([], [], color=GREY, linestyle="--", linewidth=0.9, label="cooldown starts")]


def spread(
    curves: Sequence[Curve], *, steps: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(grid, median, lowest, highest) over curves, one per run; empty curves are skipped.

    `steps`: a curve is constant between its points and keeps its last value, as widths do.
    Otherwise its points are joined by lines, and it ends with its run.
    """
    curves = [curve for curve in curves if curve[0]]
    if not curves:
        return (np.empty(0),) * 4
    grid = np.unique(np.concatenate([np.asarray(x) for x, _ in curves]))
    rows = []
    for xs, ys in curves:
        x, y = np.asarray(xs), np.asarray(ys)
        if steps:
            rows.append(y[np.maximum(np.searchsorted(x, grid, side="right") - 1, 0)])
        else:
            rows.append(np.interp(grid, x, y, left=np.nan, right=np.nan))
    values = np.stack(rows)
    return grid, np.nanmedian(values, 0), np.nanmin(values, 0), np.nanmax(values, 0)


def draw_spread(
    axes: Axes,
    band: Sequence[np.ndarray],
    color: str,
    label: str,
    *,
    steps: bool = False,
    width: float = 1.5,
) -> None:
    """Draw the median of `spread` and, if runs differ, the hatched range behind it."""
    grid, median, low, high = band
    if len(grid) and (high > low).any():
        axes.fill_between(
            grid, low, high, step="post" if steps else None, zorder=1.5, **hatched(color)
        )
    drawstyle = "steps-post" if steps else "default"
    axes.plot(
        grid, median, color=color, linewidth=width, drawstyle=drawstyle, label=label, zorder=2.5,
        marker=mark_of(grid),
    )  # fmt: skip


def mark_of(points: Sequence[float] | np.ndarray) -> str:
    """The marker of a curve: a single point has no line that would show it."""
    return "o" if len(points) == 1 else ""


def hatched(color: str) -> dict[str, Any]:
    """Fill style of a range over seeds."""
    return {
        "facecolor": color + "1c",
        "edgecolor": color + "60",
        "hatch": "//////",
        "linewidth": 0.0,
    }


def legend_above(axes: Axes, right: Axes) -> None:
    """One legend for both y axes, above the panel: inside it would cover curves."""
    lines = [*axes.lines, *(right.lines if right is not axes else ())]
    axes.legend(
        handles=[line for line in lines if not str(line.get_label()).startswith("_")],
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=SMALL,
        handlelength=1.4, columnspacing=0.9, handletextpad=0.4, borderaxespad=0.1,
    )  # fmt: skip


def symbol(kind: str) -> str:
    """An axis kind as the paper prints it: d_ai with a subscript."""
    letter, _, index = kind.partition("_")
    return f"${letter}$" if not index else f"${letter}_{{{index}}}$"


def to_ascii(text: str) -> str:
    """Replaces characters that the font may lack: a name from a run may hold any."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)


def heading(runs: Sequence[Run]) -> str:
    """The title line of a picture: task, target and seeds."""
    first = runs[0]
    which = first.title if len(runs) == 1 else f"{len(runs)} {first.told_by}s"
    return to_ascii(f"{first.task}, {goal(runs)}, {which}")
