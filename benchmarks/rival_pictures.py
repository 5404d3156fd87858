"""Pictures of compression beside its rivals, from the results files: every seed is a dot.

    python -m benchmarks.rival_pictures    # as `make tables` does

A row is a method, and the axis is the loss on test data. All were asked for the work per token that
compressed runs end with. A filled dot has at most `NEAR` times that work. Each picture keeps a
digest of its rows, by which a test sees that it is of the present results.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.small_rivals import NEAR
from benchmarks.small_tables import METHODS, RIVALS, TASKS
from benchmarks.table_sources import read
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from gaugelasso.report.figure import (
    BLUE,
    FONT,
    GREY,
    INK,
    ORANGE,
    RED,
    SMALL,
    fit_axis,
    new_figure,
    round_ticks,
    save,
    style_axes,
)

ROOT = Path(__file__).parents[1]
RETRIEVAL = Path("results/controls/retrieval.json")
IMAGES = Path("docs/images")
RETRIEVAL_PICTURE, SMALL_PICTURE = IMAGES / "rivals-retrieval.png", IMAGES / "rivals-small.png"
_LEAST = 1e-9  # smaller losses, and 0, are drawn here
_TICKS = 4  # of a panel beside others


def labels_of(*methods: str) -> dict[str, str]:
    """What the tables call these methods, also with a long fine-tuning."""
    stems = {method: method.removesuffix("-long") for method in methods}
    return {
        method: METHODS[stem] + ("" if method == stem else ", long")
        for method, stem in stems.items()
    }


# Methods of results/controls/retrieval.json.
_RETRIEVAL = {
    "compression": "compression",
    **labels_of("from scratch", "uniform"),
    "uniform-heads": "uniform, fewer heads",
    **labels_of(
        "torch-pruning-magnitude-long", "torch-pruning-magnitude", "torch-pruning-isomorphic-long",
        "torch-pruning-group-norm", "post-hoc-long", "post-hoc",
        "cofi-unbounded", "cofi", "cofi-layers", "full",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A method: for each run its loss, and whether it is as small as was asked."""

    name: str
    color: str
    runs: Sequence[tuple[float, bool]]


def color_of(method: str) -> str:
    """Blue for compression, orange for uniform models, grey for the full one, red for pruning."""
    if method.startswith(("compression", "from scratch")):
        return BLUE
    if method.startswith("uniform"):
        return ORANGE
    return GREY if method == "full" else RED


def rows_of(
    runs: Sequence[Mapping[str, Any]], names: Mapping[str, str], works: Mapping[int, float]
) -> list[Row]:
    """The methods that have runs, in the order of `names`; `works` is what each seed was asked."""
    found = []
    for method, name in names.items():
        made = [run for run in runs if run["method"] == method and run.get("loss") is not None]
        # Compression is what the others are asked to match.
        dots = [
            (run["loss"], method == "compression" or run["fma_final"] <= NEAR * works[run["seed"]])
            for run in made
        ]
        if dots:
            found.append(Row(name, color_of(method), dots))
    return found


def retrieval_rows(root: Path) -> list[Row]:
    """Retrieval at the paper's size."""
    data = read(root / RETRIEVAL)
    runs = data["runs"]
    works = dict.fromkeys((run["seed"] for run in runs), data["fma_asked"])
    return rows_of(runs, _RETRIEVAL, works)


def small_rows(root: Path) -> dict[str, tuple[float, list[Row]]]:
    """The tasks of a minute: by task its target loss and its methods, the full model last."""
    every = [row for row in read(root / RIVALS)["rows"] if row["share"] == 1]
    names = dict(METHODS)
    names["full"] = names.pop("full")
    found = {}
    for task in TASKS:
        runs = [row for row in every if row["task"] == task]
        works = {row["seed"]: row["work"] for row in runs}
        found[task] = runs[0]["named"], rows_of(runs, names, works)
    return found


def digest(rows: object) -> str:
    """Of what a picture shows."""
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def draw_rows(axes: Axes, rows: Sequence[Row], names: bool = True) -> None:
    """A dot for each run; rows from top to bottom."""
    style_axes(axes)
    for place, row in enumerate(rows):
        for loss, small in row.runs:
            axes.plot(
                max(loss, _LEAST), -place, "o", color=row.color, markersize=5, alpha=0.8,
                markerfacecolor=row.color if small else "none", markeredgewidth=1.0,
            )  # fmt: skip
    axes.set_yticks([-place for place in range(len(rows))])
    axes.set_yticklabels([row.name for row in rows] if names else [])
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    fit_axis(axes, "x", [max(loss, _LEAST) for row in rows for loss, _ in row.runs])


def draw_retrieval(rows: Sequence[Row], path: Path) -> None:
    sheet = new_figure(800)
    axes = sheet.subplots()
    draw_rows(axes, rows)
    axes.set_xlabel("loss on test data", fontsize=SMALL, color=INK)
    title = "retrieval at the paper's size, every method asked for the work of the compressed one"
    sheet.suptitle(title, fontsize=FONT + 1, color=INK)
    _legend(sheet, False)
    save(sheet, path, {"Description": digest(rows)})


def draw_small(tasks: Mapping[str, tuple[float, Sequence[Row]]], path: Path) -> None:
    """A panel for each task, with the target loss as a line."""
    sheet = new_figure(1500)
    grid = sheet.subplots(2, 3)
    for axes, (task, (named, rows)) in zip(grid.flat, tasks.items(), strict=True):
        draw_rows(axes, rows, names=axes in grid[:, 0])
        axes.xaxis.set_major_locator(FixedLocator(round_ticks(*axes.get_xlim(), most=_TICKS)))
        axes.axvline(named, color=GREY, linestyle="--", linewidth=0.9, zorder=1)
        axes.set_title(f"{TASKS[task]}, target loss {named:g}", fontsize=FONT, color=INK)
    for axes in grid[1]:
        axes.set_xlabel("loss on test data", fontsize=SMALL, color=INK)
    _legend(sheet, True)
    save(sheet, path, {"Description": digest(tasks)})


def _legend(sheet: Figure, named: bool) -> None:
    dot: dict[str, Any] = {"marker": "o", "linestyle": "", "markersize": 5, "color": INK}
    handles = [
        Line2D([], [], **dot, label="has the work that was asked for"),
        Line2D([], [], **dot, markerfacecolor="none", label="has more work"),
    ]
    if named:
        line: dict[str, Any] = {"color": GREY, "linestyle": "--", "linewidth": 0.9}
        handles.append(Line2D([], [], **line, label="target loss"))
    sheet.legend(
        handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=SMALL
    )


def main() -> None:
    draw_retrieval(retrieval_rows(ROOT), ROOT / RETRIEVAL_PICTURE)
    draw_small(small_rows(ROOT), ROOT / SMALL_PICTURE)


if __name__ == "__main__":
    main()
