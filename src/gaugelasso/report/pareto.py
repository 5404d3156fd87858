"""Held-out loss against work over several conditions, and the Pareto front of their runs."""

import math
import statistics
import textwrap
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

from gaugelasso.errors import UserError
from gaugelasso.report.costs import KINDS, cost_columns, known_kinds, named, work_format
from gaugelasso.report.data import (
    check_finished,
    check_other_seed,
    check_same,
    load_run,
    note_on_own_loops,
    run_folders,
    seed_order,
    settings,
)
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
from gaugelasso.report.formats import DASH, figure, known, metric_format, over_seeds, ratio
from gaugelasso.report.goal import goal_cell
from gaugelasso.report.layout import Table
from gaugelasso.report.methods import aims, labels
from gaugelasso.report.outcome import common_metric, loss_name, outcome
from gaugelasso.report.run import Run
from gaugelasso.report.served import after, column, served_as
from gaugelasso.runs.units import noun, unit

_HEIGHT_PX = 1000
_LEGEND_CHARS = 36


@dataclass(frozen=True)
class Point:
    """Cost and held-out loss of a finished run; `best` if it is on the front.

    `kind` is what the cost is: that of the runs' accounting, or one that all of them know.
    """

    run: Run
    kind: str
    fma: float
    loss: float
    best: bool


def load_points(paths: Sequence[Path]) -> dict[str, list[Point]]:
    """Condition -> its runs, the condition with the most work first.

    Runs of several accountings are compared in milliseconds if all of them know these by the same
    profile, else in FMA. UserError unless all runs are finished, share one task, and share one
    accounting or know both their costs, or if a seed of a condition occurs twice.
    """
    runs = [load_run(folder) for folder in run_folders(paths)]
    check_finished(runs)
    task_keys = [key for key in settings(runs[0]) if key.startswith("task.")]
    kind = _common_kind(runs)
    shared = [*task_keys, *(["compress.accounting"] if kind is None else [])]
    for before, run in pairwise(runs):
        check_same(before, run, "cannot be compared", only=shared)
    places = [(_cost(run, kind), _loss(run)) for run in runs]
    best = front(places)
    points = [
        Point(run, kind or "", *place, place in best)
        for run, place in zip(runs, places, strict=True)
    ]
    found: dict[str, list[Point]] = {}
    starts = [_start(run, kind) for run in runs]
    for point, label in zip(points, labels(runs, starts), strict=True):
        found.setdefault(label, []).append(point)
    for label, members in found.items():
        members.sort(key=lambda point: seed_order(point.run))
        for one, other in pairwise(point.run for point in members):
            check_other_seed(one, other, f"are both {label},")
    by_work = sorted(found, key=lambda label: -statistics.median(p.fma for p in found[label]))
    return {label: found[label] for label in by_work}


def _common_kind(runs: Sequence[Run]) -> str | None:
    """The cost in which runs of several accountings are compared; None for their own."""
    if len({run.accounting for run in runs}) == 1:
        return None
    known = known_kinds(runs)
    return next((kind for kind in ("ms", "fma") if kind in known), None)


def _cost(run: Run, kind: str | None) -> float:
    return outcome(run).fma_final if kind is None else float(run.costs_final[kind])


def _start(run: Run, kind: str | None) -> float:
    """The same before training."""
    return float(run.initial["fma"] if kind is None else run.costs_initial[kind])


def _compression(point: Point) -> float:
    if not point.kind:
        return outcome(point.run).compression
    return float(point.run.costs_initial[point.kind]) / point.fma if point.fma else math.inf


def _accounting(point: Point) -> str:
    """The accounting that the points' costs are of."""
    return KINDS[point.kind] if point.kind else point.run.accounting


def front(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (work, loss) pairs with less loss than every pair of less work, sorted by work."""
    best: list[tuple[float, float]] = []
    for place in sorted(set(places)):
        if not best or place[1] < best[-1][1]:
            best.append(place)
    return best


def pareto_table(points: dict[str, list[Point]]) -> Table:
    """One row per condition: mean ± std over its seeds, and which seeds are on the front."""
    point = next(iter(points.values()))[0]
    first, counted = point.run, _accounting(point)
    runs = [point.run for group in points.values() for point in group]
    metric, form = common_metric(runs), work_format(counted)
    others, served = cost_columns(runs, counted), served_as(runs)
    loss_is = loss_name(runs)
    shown = metric if metric != loss_is else None
    form_of = metric_format(shown) if shown else None
    rows = []
    for label, group in points.items():
        ends = [outcome(point.run) for point in group]
        rows.append([
            label, goal_cell([point.run for point in group if aims(point.run)]), str(len(group)),
            over_seeds([point.fma for point in group], form),
            over_seeds([_compression(point) for point in group], ratio),
            *(over_seeds([each.after(point.run) for point in group], each.form) for each in others),
            *(over_seeds([after(point.run, label) for point in group], figure) for label in served),
            over_seeds([end.loss for end in ends], figure),
            *([over_seeds([end.metric for end in ends], form_of)] if form_of else ()),
            ", ".join(point.run.mark for point in group if point.best) or DASH,
        ])  # fmt: skip
    aimed = [run for run in runs if aims(run)] or runs
    to_loss = all(run.loss_target is not None and run.metric_target is None for run in aimed)
    headers = ["condition", "loss target" if to_loss else "target", "seeds", unit(counted)]
    headers += ["compression", *(each.name for each in others), *map(column, served)]
    headers += [loss_is, *([shown] if shown else ()), f"{first.told_by}s on the front"]
    note = f"Task {first.task}; {noun(counted)} by the accounting {counted!r}. A run is on the "
    note += (
        "front if no other run here is at least as good in both loss and work, and better in one."
    )
    note += "".join(f" {each.title}." for each in others if each.kind != "fma")
    note += "".join(f" {named(kind, runs)}." for kind in ("bytes", "ms") if KINDS[kind] == counted)
    note += " Measured: by bench --inference." if served else ""
    note += note_on_own_loops(runs)
    return Table("Loss against work", headers, rows, note, left=(0, len(headers) - 1))


def draw_pareto(points: dict[str, list[Point]], path: Path | IO[bytes]) -> None:
    """Write the PNG: held-out loss against work per token, one colour per condition."""
    runs = [point.run for group in points.values() for point in group]
    sheet = new_figure(_HEIGHT_PX)
    axes = sheet.subplots()
    counted = to_ascii(_accounting(next(iter(points.values()))[0]))
    style_axes(axes, f"final {unit(counted)} (accounting: {counted})", loss_name(runs))
    places = [(point.fma, point.loss) for group in points.values() for point in group]
    best = front(places)
    # Steps, not straight lines: between two runs only the loss of the cheaper one is reached.
    if len(best) > 1:
        axes.plot(*zip(*best, strict=True), color=GREY, linewidth=1.2, drawstyle="steps-post",
                  label="Pareto front", zorder=2)  # fmt: skip
    for number, (label, group) in enumerate(points.items()):
        axes.plot(
            [point.fma for point in group], [point.loss for point in group], linestyle="",
            marker=MARKERS[number // len(COLORS) % len(MARKERS)], markersize=6, alpha=0.85,
            color=COLORS[number % len(COLORS)], markeredgecolor="white", markeredgewidth=0.6,
            label=textwrap.fill(to_ascii(label), _LEGEND_CHARS).replace("$", r"\$"), zorder=3,
        )  # fmt: skip
    fit_axis(axes, "x", [fma for fma, _ in places])
    fit_axis(axes, "y", [loss for _, loss in places])
    sheet.legend(loc="outside right upper", frameon=False, fontsize=SMALL, labelcolor=INK)
    title = f"{runs[0].task}, {_counted(points, 'condition')}, {_counted(runs, 'run')}"
    sheet.suptitle(to_ascii(title), fontsize=FONT + 1, color=INK, parse_math=False)
    save(sheet, path)


def _counted(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _loss(run: Run) -> float:
    loss = outcome(run).loss
    if known(loss, figure) == DASH or loss is None:
        raise UserError(f"{str(run.path)!r} has no finite held-out loss")
    return loss
