"""What the script of a report page draws: structures and curves of runs, thinned out.

Sizes stay moderate however long a run is. Of many structural events some are left out, evenly,
and a curve keeps the least and the greatest value of each of many equal parts, so that spikes
stay visible. The last structure and the last value are always kept.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gaugelasso.report.event_table import axis_name, counted_channels, operator_list
from gaugelasso.report.figure import Curve
from gaugelasso.report.formats import is_accuracy
from gaugelasso.report.outcome import last_step_ms, loss_name, outcome
from gaugelasso.report.run import AXIS_NAMES, END_AXES, LAYER_KINDS, Run
from gaugelasso.report.training import smooth_time
from gaugelasso.runs.units import noun, unit

# The most structures of one run, and points of one of its curves; and of all runs together.
FRAMES, POINTS = 400, 600
_ALL_FRAMES, _ALL_POINTS = 2000, 6000
_DIGITS = 5  # of a value on a curve


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """The content of the page's data block: how the structure is laid out, and each run."""
    first = runs[0]
    axes = list(dict.fromkeys(axis for run in runs for axis in run.initial["widths"]))
    frames = min(FRAMES, max(20, _ALL_FRAMES // len(runs)))
    points = min(POINTS, max(60, _ALL_POINTS // len(runs)))
    return {
        "unit": unit(first.accounting),
        "noun": noun(first.accounting),
        "loss": loss_name(runs),
        "metric": {"name": first.metric_name, "percent": is_accuracy(first.metric_name)},
        "axes": [axis_name(axis) for axis in axes],
        **_layout(first, axes),
        "runs": [_run_data(run, axes, frames, points) for run in runs],
        "thinned": any(len(_events(run)) > frames for run in runs),
    }


def to_script(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element around it, whatever names it holds."""
    text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def thin_curve(curve: Curve, most: int) -> Curve:
    """At most about `most` points: first, last, and the least and greatest of equal parts."""
    steps, values = curve
    if len(steps) > most:
        size = math.ceil(len(steps) / max(1, most // 2 - 1))
        kept = {0, len(steps) - 1}
        for start in range(0, len(steps), size):
            part = range(start, min(start + size, len(steps)))
            kept |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
        steps, values = [steps[i] for i in sorted(kept)], [values[i] for i in sorted(kept)]
    return steps, [float(f"{value:.{_DIGITS}g}") for value in values]


def _layout(run: Run, axes: list[str]) -> dict[str, Any]:
    """The rows of the drawing: layers by kinds of axes, or one axis of an own model a row."""
    place = {axis: index for index, axis in enumerate(axes)}
    if run.own_model:
        rows = [{"name": axis_name(axis), "cells": [place[axis]]} for axis in axes]
        return {"columns": [{"kind": "channels", "name": "channels that are left"}],
                "rows": rows, "ends": []}  # fmt: skip

    def layer(depth: int) -> list[int | None]:
        operators = dict.fromkeys(LAYER_KINDS[:4], "attention") | dict.fromkeys(
            LAYER_KINDS[4:], "mlp"
        )
        return [place.get(f"operators.{op}_{depth}.{kind}") for kind, op in operators.items()]

    return {
        "columns": [{"kind": kind, "name": AXIS_NAMES[kind]} for kind in LAYER_KINDS],
        "rows": [{"name": str(depth), "cells": layer(depth)} for depth in range(run.layers)],
        "ends": [
            {"kind": kind, "name": AXIS_NAMES[kind], "axis": place[axis]}
            for kind, axis in END_AXES.items()
            if axis in place
        ],
    }


def _run_data(run: Run, axes: list[str], frames: int, points: int) -> dict[str, Any]:
    curves = {
        "loss": run.column("loss"),
        "metric": run.evaluations(),
        "step_ms": smooth_time(run),
    }
    return {
        "title": run.title,
        "last": run.last_step,
        "target": run.loss_target,
        "cooldown": run.cooldown_start,
        "frames": _frames(run, axes, frames),
        "curves": {name: thin_curve(curve, points) for name, curve in curves.items()},
        "phases": _phases(run),
        "final": _final(run),
    }


def _events(run: Run) -> list[Mapping[str, Any]]:
    """The events that changed a width, rollbacks among them."""
    widths = run.initial["widths"]
    found: list[Mapping[str, Any]] = []
    for event in run.events:
        if event["widths"] != widths:
            widths = event["widths"]
            found.append(event)
    return found


def _frames(run: Run, axes: list[str], most: int) -> dict[str, Any]:
    """Structures in the order of steps; the first is the initial one.

    `changes` holds, flat, the index of each axis that differs from the frame before, and its
    width. A removed operator has width 0. Where no row of the log has the structure of a frame,
    because another event came first, `parameters` is that of the frame before.
    """
    events = _events(run)
    number = len(events)
    kept = list(range(number))
    if number > most:
        kept = sorted({round((place + 1) * number / most) - 1 for place in range(most)})
    ends = [event["step"] for event in events[1:]] + [math.inf]
    first = outcome(run).parameters_initial
    data: dict[str, Any] = {"step": [0], "fma": [run.initial["fma"]], "parameters": [first]}
    data |= {"text": [""], "events": [0], "back": [False]}
    before = [run.initial["widths"].get(axis, 0) for axis in axes]
    changes: list[list[int]] = [[part for pair in enumerate(before) for part in pair]]
    for place, index in enumerate(kept):
        event = events[index]
        widths = [event["widths"].get(axis, 0) for axis in axes]
        pairs = [(i, w) for i, (w, old) in enumerate(zip(widths, before, strict=True)) if w != old]
        changes.append([part for pair in pairs for part in pair])
        data["step"].append(max(event["step"], 1))  # as in Run: 0 is what the run began with
        data["fma"].append(event["fma"])
        counted = _parameters(run, event, ends[index])
        data["parameters"].append(data["parameters"][-1] if counted is None else counted)
        data["text"].append(_event_text(event))
        data["back"].append(event.get("returned_to") is not None)
        data["events"].append(index - (kept[place - 1] if place else -1))
        before = widths
    return data | {"changes": changes}


def _parameters(run: Run, event: Mapping[str, Any], end: float) -> int | None:
    """Of the first row of the log from this event to the next, in step `end`; None without one.

    Two structures may have the same work. A row of the step of a return is of before it.
    """
    first = event["step"] + (event.get("returned_to") is not None)
    rows = (row for row in run.metrics if first <= row["step"] < end)
    row = next((row for row in rows if row["fma"] == event["fma"]), None)
    return None if row is None else row["parameters"]


def _event_text(event: Mapping[str, Any]) -> str:
    if event.get("returned_to") is not None:
        return f"rollback to the state of step {event['returned_to']:,}"
    named = (("dropped", "dropped"), ("exchanged", "exchange took"), ("grown", "grew"))
    parts = [f"{verb} {counted_channels(event[key])}" for key, verb in named if event.get(key)]
    if event["removed"]:
        parts.append(f"removed {operator_list(event['removed'])}")
    return "; ".join(parts)


def _phases(run: Run) -> list[list[Any]]:
    """[last step, phase] of each phase of the log, in order."""
    ends: list[list[Any]] = []
    for row in run.metrics:
        if ends and ends[-1][1] == row["phase"]:
            ends[-1][0] = row["step"]
        else:
            ends.append([row["step"], row["phase"]])
    return ends


def _final(run: Run) -> dict[str, Any] | None:
    """The figures of summary.json; None until the run is finished."""
    if run.summary is None:
        return None
    end = outcome(run)
    return {"fma": end.fma_final, "parameters": end.parameters_final, "loss": end.loss,
            "metric": end.metric, "time": last_step_ms(run)}  # fmt: skip


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
