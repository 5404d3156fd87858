"""Training curves: the loss and its target, and the cost of a step as the model shrinks."""

from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from gaugelasso.report.figure import (
    BLUE,
    FONT,
    GREEN,
    GREY,
    INK,
    RED,
    SMALL,
    Curve,
    cooldown_key,
    draw_spread,
    hatched,
    heading,
    legend_above,
    log_axis,
    mark_cooldown,
    mark_of,
    new_figure,
    save,
    spread,
    step_axis,
    style_axes,
    to_ascii,
    twin,
)  # fmt: skip
from gaugelasso.report.formats import is_accuracy
from gaugelasso.report.outcome import loss_name
from gaugelasso.report.run import Run
from gaugelasso.runs.units import unit

_HEIGHT_PX = 800


def draw_training(runs: Sequence[Run], path: Path | IO[bytes]) -> None:
    """Write the two-panel PNG: loss and metric, step time and work, against training step.

    With several runs a line is the median over seeds, and the hatched band is their range.
    """
    figure = new_figure(_HEIGHT_PX)
    left, right = figure.subplots(1, 2)
    _draw_loss(left, runs)
    _draw_time(right, runs)
    for axes in (left, right):
        mark_cooldown(axes, runs)
        step_axis(axes, max(run.last_step for run in runs))
    _draw_key(figure, runs)
    figure.suptitle(heading(runs), fontsize=FONT + 1, color=INK, parse_math=False)
    save(figure, path)


def _draw_loss(axes: Axes, runs: Sequence[Run]) -> None:
    named, metric = [run.loss_target for run in runs], runs[0].metric_name
    target = sorted({loss for loss in named if loss is not None})
    scores = [run.evaluations() for run in runs]
    loss, score = spread([run.column("loss") for run in runs]), spread(scores)
    shared = all(run.metric_is_loss for run in runs)
    style_axes(axes, "training step", "loss" if shared else "training loss")
    values = np.concatenate([loss[2], loss[3], target, *(score[2:] if shared else ())])
    positive = values[values > 0]
    if len(positive):
        log_axis(axes, positive.min() / 1.4, positive.max() * 1.4)
    draw_spread(axes, loss, RED, "training loss")
    for number, limit in enumerate(target):
        label = "_" if number else "loss target"  # one entry in the legend
        axes.axhline(limit, color=INK, linewidth=1.0, linestyle=":", zorder=4, label=label)
    if shared:
        right = axes
    else:
        axes.yaxis.label.set_color(RED)
        right = twin(axes, "", GREEN)
        right.set_ylabel(to_ascii(metric), fontsize=SMALL, color=GREEN, parse_math=False)
    # A second band would hide the first, so each seed is a thin line here.
    for one in scores if len(runs) > 1 else ():
        right.plot(*one, color=GREEN, alpha=0.45, linewidth=0.7, marker=mark_of(one[0]))
    loss_is = loss_name(runs)
    name = f"{loss_is} ({metric})" if shared and metric != loss_is else metric
    label = to_ascii(name).replace("$", r"\$") if len(score[0]) else "_"  # no entry in the legend
    right.plot(*score[:2], color=GREEN, linewidth=1.5, marker=mark_of(score[0]), label=label)
    if is_accuracy(metric):
        right.set_ylim(0, 1.03)
        right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    legend_above(axes, right)


def _draw_time(axes: Axes, runs: Sequence[Run]) -> None:
    style_axes(axes, "training step", "step time (ms)")
    axes.yaxis.label.set_color(BLUE)
    if len(runs) == 1:
        axes.plot(*runs[0].column("step_ms"), color=BLUE, alpha=0.35, linewidth=0.6, zorder=1)
    time = spread([smooth_time(run) for run in runs])
    draw_spread(axes, time, BLUE, "step time (running median)")
    if len(time[0]):
        # Graph captures and other processes cause outliers, so the medians set the scale.
        axes.set_ylim(0, 1.25 * time[3].max())
    label = unit(runs[0].accounting)
    right = twin(axes, label, INK)
    work = spread([run.fma_trajectory() for run in runs], steps=True)
    draw_spread(right, work, INK, label, steps=True)
    right.lines[-1].set_linestyle((0, (4, 1.5)))
    top = float(work[3].max())
    log_axis(right, min(float(work[2].min()), top / 8) / 1.25, top * 1.35)
    legend_above(axes, right)


def _draw_key(figure: Figure, runs: Sequence[Run]) -> None:
    """The legend for both panels; the legends of the panels name the curves."""
    handles: list[Line2D | Patch] = []
    if len(runs) > 1:
        handles = [
            Line2D([], [], color=GREY, linewidth=1.5, label="median over seeds"),
            Patch(label="range over seeds", **hatched(GREY)),
            Line2D([], [], color=GREEN, alpha=0.45, linewidth=0.7, label="one seed"),
        ]
    handles += cooldown_key(runs)
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False,
                      fontsize=SMALL)  # fmt: skip


def smooth_time(run: Run) -> Curve:
    """Running median of step times, because rows that include an event take longer."""
    steps, times = run.column("step_ms")
    half = max(4, len(times) // 80)
    smooth = [float(np.median(times[max(0, i - half) : i + half + 1])) for i in range(len(times))]
    return steps, smooth
