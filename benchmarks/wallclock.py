"""Step time and loss by step, a column for each task, as the paper's fig:wallclock.

    python -m benchmarks.wallclock runs/ff31 runs/charlm runs/mae runs/retrieval \
        --data results/controls/wallclock.json --picture docs/images/wallclock.png
    python -m benchmarks.wallclock --data results/controls/wallclock.json \
        --picture docs/images/wallclock.png    # draws it again

With runs, writes what it draws as JSON; without, draws that file. Curves of other tasks that the
file has stay, so that the runs need not be on one machine. Of a run it reads `summary.json`
and `metrics.jsonl`, and `environment.json` if that is there. Tasks are in the order of the paper.
A run should have been alone on its device: the step times of runs that shared it are no speeds.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept_rows import with_command

from gaugelasso.errors import UserError
from gaugelasso.report.figure import (
    BLUE,
    GREY,
    INK,
    RED,
    WIDTH_PX,
    log_axis,
    new_figure,
    save,
    step_axis,
    style_axes,
    to_ascii,
    twin,
)
from gaugelasso.report.schema import checked, checked_rows
from gaugelasso.runs.command import command
from gaugelasso.runs.reading import exists, read_json, read_rows
from gaugelasso.runs.writing import make_folder, write_text

MOST = 200  # points of a curve
_HEIGHT_PX = WIDTH_PX // 4
ORDER = ("ff31", "charlm", "mae", "retrieval")
_KEYS = ("task", "seed", "target", "cooldown", "step", "step_ms", "loss")


# --- data ----------------------------------------------------------------------------------


def curves_of(folder: Path) -> dict[str, Any]:
    """The curves of a finished run; UserError if it is not one."""
    if not exists(folder / "summary.json"):
        raise UserError(f"{str(folder)!r} is not a finished run: summary.json is missing")
    summary, log = read_json(folder / "summary.json", finite=False), folder / "metrics.jsonl"
    summary = checked(folder / "summary.json", summary)
    rows = list(checked_rows(log, read_rows(log)))
    if not rows:
        raise UserError(f"{str(log)!r} has no rows")
    place = folder / "environment.json"
    environment = checked(place, read_json(place)) if exists(place) else {}
    start = next((at for at, row in enumerate(rows) if row["phase"] == "cooldown"), None)
    return {
        "task": summary["task"],
        "seed": summary["seed"],
        "fma_initial": summary["fma_initial"],
        "fma_final": summary["fma_final"],
        "target": summary.get("loss_target"),
        # To one logging interval: the last row before it.
        "cooldown": rows[start - 1]["step"] if start else None,
        **{key: environment.get(key) for key in ("commit", "hardware", "date")},
        **thinned(rows),
    }


def thinned(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """At most `MOST` points, each of as many neighbouring rows.

    A point has the last of their steps, the median of their times (a row with an event, or with
    the capture of a graph, takes far longer) and the mean of their losses; null if none is finite.
    """
    size = math.ceil(len(rows) / MOST)
    parts = [rows[at : at + size] for at in range(0, len(rows), size)]
    return {
        "step": [part[-1]["step"] for part in parts],
        "step_ms": [_figure(statistics.median, part, "step_ms") for part in parts],
        "loss": [_figure(statistics.fmean, part, "loss") for part in parts],
    }


def _figure(
    of: Callable[[list[float]], float], rows: Sequence[Mapping[str, Any]], key: str
) -> float | None:
    values = [value for row in rows if (value := row.get(key)) is not None and math.isfinite(value)]
    return float(f"{of(values):.4g}") if values else None


def collect(folders: Sequence[Path], old: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of the file; UserError for a task twice.

    Curves of other tasks, commands and the note of an `old` file stay.
    """
    before = old or {"curves": []}
    curves = [curves_of(folder) for folder in folders]
    names = [each["task"] for each in curves]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two runs are of task {twice[0]!r}; give one run for each task")
    both = [*(each for each in before["curves"] if each["task"] not in names), *curves]
    known = {name: place for place, name in enumerate(ORDER)}
    both.sort(key=lambda each: known.get(each["task"], len(known)))
    about = {key: _all_of(key, both) for key in ("commit", "hardware", "date")}
    note = {"note": before["note"]} if "note" in before else {}
    return {"command": with_command(before, command()), **about, **note, "curves": both}


def _all_of(key: str, curves: Sequence[Mapping[str, Any]]) -> str | None:
    """What the curves say of their origin, each once."""
    return ", ".join(dict.fromkeys(filter(None, (each.get(key) for each in curves)))) or None


def read_file(path: Path) -> dict[str, Any]:
    """The content of a file that this module wrote; UserError if it is another."""
    data = read_json(path)
    curves = data.get("curves") if isinstance(data, dict) else None
    if not isinstance(curves, list) or not curves:
        raise UserError(f"{str(path)!r} has no 'curves'; name runs to write it")
    for number, each in enumerate(curves):
        missing = [key for key in _KEYS if not isinstance(each, dict) or key not in each]
        if missing:
            raise UserError(f"curves[{number}] of {str(path)!r}: key {missing[0]!r} is missing")
    return dict(data)


# --- picture -------------------------------------------------------------------------------


def draw(curves: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Blue: milliseconds of a step. Red: training loss, dotted its target. Dashed: cooldown."""
    sheet = new_figure(_HEIGHT_PX)
    for axes, each in zip(sheet.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        style_axes(axes, "training step", "step time (ms)")
        title = f"{each['task']}, seed {each['seed']}"
        axes.set_title(to_ascii(title), fontsize=9, color=INK, parse_math=False)
        axes.yaxis.label.set_color(BLUE)
        axes.tick_params(axis="y", colors=BLUE)
        axes.plot(each["step"], _gaps(each["step_ms"]), color=BLUE, linewidth=1.3)
        axes.set_ylim(0, _top(each["step_ms"]))
        right = twin(axes, "training loss", RED)
        right.plot(each["step"], _gaps(each["loss"]), color=RED, linewidth=1.0)
        shown = [loss for loss in each["loss"] if loss is not None and loss > 0]
        # A run without a target of the loss names one that any model has.
        targets = [loss for loss in [each["target"]] if shown and 0 < (loss or 0) <= max(shown)]
        if shown := shown + targets:
            log_axis(right, min(shown) / 1.4, max(shown) * 1.4)
        for target in targets:
            right.axhline(target, color=INK, linewidth=0.9, linestyle=":")
        if each["cooldown"] is not None:
            axes.axvline(each["cooldown"], color=GREY, linewidth=0.9, linestyle="--")
        step_axis(axes, each["step"][-1])
    save(sheet, path)


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _top(times: Sequence[float | None]) -> float:
    """The first point includes the start of a run, which would set the scale."""
    known = [time for time in times[1:] or times if time is not None]
    return 1.25 * max(known, default=1.0)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, help="Finished runs, one for each task.")
    parser.add_argument("--data", type=Path, required=True, help="The JSON file of the curves.")
    parser.add_argument("--picture", type=Path, help="The PNG to draw.")
    given = parser.parse_args(words)
    if not given.runs and given.picture is None:
        parser.error("nothing to do: name runs, or a --picture to draw")
    try:
        if given.runs:
            data = collect(given.runs, read_file(given.data) if exists(given.data) else None)
            make_folder(given.data.parent)
            write_text(given.data, json.dumps(data) + "\n")
        curves = read_file(given.data)["curves"]
        if given.picture is not None:
            make_folder(given.picture.parent)
            draw(curves, given.picture)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
