"""The picture of a baseline: loss against work, and the models side by side."""

from pathlib import Path
from typing import IO

from matplotlib.axes import Axes

from gaugelasso.report.baseline import Data, Role, by_name, compared
from gaugelasso.report.figure import (
    BLUE,
    FONT,
    GREY,
    INK,
    ORANGE,
    RED,
    SMALL,
    log_axis,
    new_figure,
    save,
    style_axes,
    to_ascii,
)
from gaugelasso.report.formats import milliseconds, short

_HEIGHT_PX = 900
_COLORS: dict[Role, str] = {"full": GREY, "smallest": BLUE, "run": RED, "retrained": ORANGE}
_FIGURES = (
    ("FMA per token", "fma", short),
    ("parameters", "parameters", short),
    ("latency", "latency_ms", milliseconds),
    ("training work", "training_fma", short),
)


def draw_baseline(data: Data, path: Path | IO[bytes]) -> None:
    """Write the PNG. Left: test loss against work; right: figures relative to the run."""
    sheet = new_figure(_HEIGHT_PX)
    left, right = sheet.subplots(1, 2)
    _draw_losses(left, data)
    _draw_bars(right, data)
    seeds = len(by_name(data)["retrained"]["runs"])
    title = f"{data['task']}: {data['steps']:,} steps, {seeds} seed{'s' if seeds > 1 else ''}"
    sheet.suptitle(to_ascii(title), fontsize=FONT + 1, color=INK, parse_math=False)
    save(sheet, path)


def _draw_losses(axes: Axes, data: Data) -> None:
    accounting = to_ascii(data["accounting"])
    style_axes(axes, f"FMA per token (accounting: {accounting})", "test loss", "Loss against work")
    rows = by_name(data)
    uniform = [row for row in data["rows"] if row["kind"] == "uniform" and row["loss"] is not None]
    uniform.sort(key=lambda row: row["fma"])
    own = rows["run"]["loss"]
    if own is not None:
        axes.axhline(
            own, color=RED, linestyle="--", linewidth=0.9, zorder=1, label="loss of the run"
        )
    axes.plot([row["fma"] for row in uniform], [row["loss"] for row in uniform], color=BLUE,
              linewidth=1.0, alpha=0.5, zorder=2)  # fmt: skip
    groups = (
        ("uniform, reached the loss", BLUE, "o", [row for row in uniform if row["held"]], True),
        ("uniform, missed it", BLUE, "o", [row for row in uniform if not row["held"]], False),
        ("run's structure, retrained", ORANGE, "D", [rows["retrained"]], rows["retrained"]["held"]),
        ("run", RED, "*", [rows["run"]], True),
    )
    for label, color, marker, group, filled in groups:
        size = 11 if marker == "*" else 6
        seeds = [(row["fma"], run["loss"]) for row in group for run in row["runs"]
                 if len(row["runs"]) > 1 and run["loss"] is not None]  # fmt: skip
        axes.plot([x for x, _ in seeds], [y for _, y in seeds], marker, color=color, alpha=0.45,
                  markersize=3.5, markeredgewidth=0, linestyle="", zorder=2.5)  # fmt: skip
        shown = [row for row in group if row["loss"] is not None]
        axes.plot(
            [row["fma"] for row in shown], [row["loss"] for row in shown], marker, linestyle="",
            markersize=size, color=color, markerfacecolor=color if filled else "white",
            markeredgecolor=color, markeredgewidth=1.0, zorder=4 if marker == "*" else 3,
            label=label if shown else None,
        )  # fmt: skip
    losses = [run["loss"] for row in data["rows"] for run in row["runs"] if run["loss"] is not None]
    work = [row["fma"] for row in data["rows"]]
    log_axis(axes, min(work) / 1.2, max(work) * 1.2, which="x")
    if losses and min(losses) > 0:
        log_axis(axes, min(losses) / 1.4, max(losses) * 1.4)
    axes.legend(frameon=False, fontsize=SMALL, labelcolor=INK)


def _draw_bars(axes: Axes, data: Data) -> None:
    style_axes(axes, "relative to the run", title="Side by side")
    models, own = compared(data), by_name(data)["run"]
    height, largest, least = 0.8 / len(models), 1.0, 1.0
    for place, (_, key, form) in enumerate(_FIGURES):
        for number, (role, (_, row)) in enumerate(models.items()):
            if row[key] is None or not own[key]:
                continue
            share = row[key] / own[key]
            largest, least = max(largest, share), min(least, share)
            y = place + (number - (len(models) - 1) / 2) * height
            axes.barh(y, share, height * 0.9, color=_COLORS[role], zorder=2)
            axes.annotate(form(row[key]), (share, y), (3, 0), textcoords="offset points",
                          va="center", fontsize=SMALL - 1, color=INK)  # fmt: skip
    axes.set_yticks(range(len(_FIGURES)), [name for name, _, _ in _FIGURES])
    axes.invert_yaxis()
    log_axis(axes, least / 1.6, largest * 2.2, which="x")
    axes.axvline(1.0, color=INK, linewidth=0.8, zorder=3)
    for role, (label, _) in models.items():
        axes.barh(0, 0, color=_COLORS[role], label=to_ascii(label).replace("$", r"\$"))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False,
                fontsize=SMALL, labelcolor=INK)  # fmt: skip
