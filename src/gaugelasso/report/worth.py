"""The picture of a baseline: loss against work, and the models side by side."""

from pathlib import Path
from typing import IO

from matplotlib.axes import Axes

from gaugelasso.report.baseline import Data, Role, by_name, compared
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
    save,
    style_axes,
    to_ascii,
)
from gaugelasso.report.formats import milliseconds, short

_HEIGHT_PX = 900
_COLORS: dict[Role, str] = {"full": GREY, "smallest": BLUE, "run": RED, "retrained": ORANGE}
_LADDERS = {
    "dims": ("uniform, narrower heads", BLUE, "o"),
    "heads": ("uniform, fewer heads", GREEN, "s"),
}
_MARKERS: dict[Role, str] = {"full": "s", "smallest": "o", "run": "*", "retrained": "D"}
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
    _draw_ratios(right, data)
    seeds = len(by_name(data)["retrained"]["runs"])
    title = f"{data['task']}: {data['steps']:,} steps, {seeds} seed{'s' if seeds > 1 else ''}"
    sheet.suptitle(to_ascii(title), fontsize=FONT + 1, color=INK, parse_math=False)
    save(sheet, path)


def _draw_losses(axes: Axes, data: Data) -> None:
    """Large marks are medians over seeds, small ones seeds; hollow marks missed the loss."""
    accounting = to_ascii(data["accounting"])
    style_axes(axes, f"FMA per token (accounting: {accounting})", "test loss", "Loss against work")
    rows = by_name(data)
    losses = [run["loss"] for row in data["rows"] for run in row["runs"] if run["loss"] is not None]
    work = [row["fma"] for row in data["rows"]]
    log_axis(axes, min(work) / 1.2, max(work) * 1.2, which="x")
    if losses and min(losses) > 0:
        log_axis(axes, min(losses) / 1.4, max(losses) * 1.4)
    own = rows["run"]["loss"]
    if own is not None:
        axes.axhline(own, color=RED, linestyle="--", linewidth=0.9, zorder=1)
    for scale, (label, color, marker) in _LADDERS.items():
        ladder = [row for row in data["rows"] if scale in row["scales"]]
        ladder = sorted((r for r in ladder if r["loss"] is not None), key=lambda row: row["fma"])
        if ladder:
            places = [row["fma"] for row in ladder], [row["loss"] for row in ladder]
            axes.plot(*places, color=color, linewidth=1.0, alpha=0.5, zorder=2)
            _draw_marks(axes, ladder, color, marker, label)
    _draw_marks(axes, [rows["retrained"]], ORANGE, "D", "run's structure, retrained")
    _draw_marks(axes, [rows["run"]], RED, "*", "run")
    axes.plot([], [], "o", color=GREY, markerfacecolor="white", label="hollow: missed the loss")
    axes.legend(frameon=False, fontsize=SMALL, labelcolor=INK)


def _draw_marks(axes: Axes, rows: list[Data], color: str, marker: str, label: str) -> None:
    for row in rows:
        seeds = [run["loss"] for run in row["runs"] if run["loss"] is not None]
        if len(row["runs"]) > 1:
            axes.plot([row["fma"]] * len(seeds), seeds, marker, color=color, alpha=0.45,
                      markersize=3.5, markeredgewidth=0, zorder=2.5)  # fmt: skip
        if row["loss"] is not None:
            axes.plot(
                [row["fma"]], [row["loss"]], marker, color=color, markeredgewidth=1.0, zorder=3,
                markersize=11 if marker == "*" else 6,
                markerfacecolor=color if row["held"] else "white",
            )  # fmt: skip
    axes.plot([], [], marker, color=color, label=label)


def _draw_ratios(axes: Axes, data: Data) -> None:
    """Every figure as a distance from that of the run: on a log scale a bar has no natural foot."""
    style_axes(axes, "relative to the run (log scale)", title="Side by side")
    models, own = compared(data), by_name(data)["run"]
    step, shares = 0.8 / len(models), [1.0]
    for place, (_, key, form) in enumerate(_FIGURES):
        for number, (role, (_, row)) in enumerate(models.items()):
            if row[key] is None or not own[key]:
                continue
            shares.append(share := row[key] / own[key])
            y = place + (number - (len(models) - 1) / 2) * step
            axes.plot([1.0, share], [y, y], color=_COLORS[role], linewidth=2.5, zorder=2)
            axes.plot([share], [y], _MARKERS[role], color=_COLORS[role], markersize=6, zorder=4)
            side = 1 if share >= 1 else -1
            axes.annotate(
                form(row[key]), (share, y), (7 * side, 0), textcoords="offset points",
                ha="left" if side > 0 else "right", va="center", fontsize=SMALL - 1, color=INK,
            )  # fmt: skip
    axes.set_yticks(range(len(_FIGURES)), [name for name, _, _ in _FIGURES])
    axes.set_ylim(len(_FIGURES) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    log_axis(axes, min(shares) / 2.2, max(shares) * 2.2, which="x")
    axes.axvline(1.0, color=RED, linewidth=0.9, linestyle="--", zorder=1)
    for role, (label, _) in models.items():
        axes.plot([], [], _MARKERS[role], color=_COLORS[role], markersize=6,
                  label=to_ascii(label).replace("$", r"\$"))  # fmt: skip
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False,
                fontsize=SMALL, labelcolor=INK)  # fmt: skip
