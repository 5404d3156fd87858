"""What the files of a run must hold, checked once, as they are read.

A spoiled file is told by its name and by the first thing wrong with it, so whatever prints or
draws need not doubt a run. Keys that no report asks for are left alone.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.runs.folder import CONFIG_SECTIONS


@dataclass(frozen=True)
class Kind:
    """What a value must be, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


# Key -> what its value must be: a kind, or again a table with keys.
Shape = Mapping[str, "Kind | Shape"]


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_figure(value: Any) -> bool:
    return value is None or type(value) is float or _is_finite(value)


def _table_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_operator(value: Any) -> bool:
    if not isinstance(value, dict) or "kind" not in value:
        return False
    heads = ("depth", "heads", "kv_heads")
    return value["kind"] != "attention" or all(_is_whole(value.get(key)) for key in heads)


def _is_channel(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("axis"), str)
        and all(_is_finite(value.get(key)) for key in ("index", "price", "utility_per_fma"))
    )


TEXT = Kind("a string", lambda value: isinstance(value, str))
WORD = Kind("a string or null", lambda value: value is None or TEXT.fits(value))
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
WHOLE = Kind("a whole number", _is_whole)
POSITIVE = Kind("a whole number above 0", lambda value: _is_whole(value) and value > 0)
FINITE = Kind("a finite number", _is_finite)
WORK = Kind("a finite number above 0", lambda value: _is_finite(value) and value > 0)
# What was measured: it may not have been yet, or not be finite.
FIGURE = Kind("a number or null", _is_figure)
FIGURES = Kind("a table of numbers", _table_of(_is_figure))
COUNTS = Kind("a table of whole numbers", _table_of(_is_whole))
WIDTHS = Kind(
    "a table of widths with the residual sites D",
    lambda value: COUNTS.fits(value) and value.get("D", 0) > 0,
)
NAMES = Kind("a list of strings", _list_of(TEXT.fits))
OPERATORS = Kind("a list of operators", _list_of(_is_operator))
CHANNELS = Kind("a list of channels", _list_of(_is_channel))

_MUST: Mapping[str, Shape] = {
    "config.json": {
        **{section: {} for section in CONFIG_SECTIONS},
        "task": {"name": TEXT},
        "target": {"loss": FINITE},
        "compress": {"accounting": TEXT},
        "train": {"seed": WHOLE, "steps": WHOLE, "eval_every": POSITIVE},
    },
    "environment.json": {"date": TEXT},
    "initial.json": {"fma": WORK, "widths": WIDTHS},
    "metrics.jsonl": {
        "step": WHOLE, "phase": TEXT, "loss": FIGURE, "fma": FINITE, "parameters": FIGURE,
    },
    "events.jsonl": {
        "step": WHOLE, "fma_before": WORK, "fma": FINITE, "widths": COUNTS, "dropped": COUNTS,
        "removed": NAMES, "refused": SWITCH,
    },
    "resumed.jsonl": {"step": WHOLE, "date": TEXT},
    "summary.json": {
        "seed": WHOLE, "steps": WHOLE, "fma_initial": WORK, "fma_final": FINITE,
        "compression": FIGURE, "parameters_initial": FIGURE, "parameters_final": FIGURE,
        "loss": FIGURE, "metric": {"name": TEXT, "value": FIGURE}, "target_reached_step": FIGURE,
        "training_fma": FIGURE, "wall_s": FIGURE, "structure": {},
    },
}  # fmt: skip
# What early versions did not write, or not every task has.
_AROUND: Shape = {"command": WORD, "commit": WORD, "hardware": WORD}
_MAY: Mapping[str, Shape] = {
    "environment.json": _AROUND,
    "resumed.jsonl": _AROUND,
    "initial.json": {
        "structure": {"layers": WHOLE, "operators": OPERATORS},
        "metric": {"name": TEXT, "lower_is_better": SWITCH},
    },
    "events.jsonl": {
        "loss_before": FIGURE, "loss_balanced": FIGURE, "loss_after": FIGURE, "undone": FIGURES,
    },
    "summary.json": {
        "figures": FIGURES, "returns": WHOLE, "skipped_steps": WHOLE, "next_to_go": CHANNELS,
    },
}  # fmt: skip


def shaped(path: Path, data: Any) -> Any:
    """The content of a run's file as it is; UserError, naming the file, where it is of no run."""
    return _shaped(path.name, repr(str(path)), data)


def shaped_rows(path: Path, rows: Iterable[Any]) -> Iterator[Any]:
    """The same for every row of a log, whose steps never go back."""
    last = 0
    for number, row in enumerate(rows, start=1):
        where = f"line {number} of {str(path)!r}"
        step = _shaped(path.name, where, row)["step"]
        if step < last:
            raise UserError(f"{where} is of no run: its 'step' is before that of the line above")
        last = step
        yield row


def _shaped(name: str, where: str, data: Any) -> Any:
    check(where, data, _MUST[name])
    check(where, data, {key: kind for key, kind in _MAY.get(name, {}).items() if key in data})
    if name == "metrics.jsonl":  # whose other columns, the task's metric among them, are figures
        check(where, data, dict.fromkeys(data.keys() - {"phase"}, FIGURE))
    return data


def check(where: str, data: Any, wanted: Shape, inside: str = "") -> None:
    """UserError, saying `where`, unless `data` is a table with all that is wanted."""
    if not isinstance(data, dict):
        raise UserError(f"{where} is of no run: {repr(inside) if inside else 'it'} is no table")
    for key, kind in wanted.items():
        name = f"{inside}.{key}" if inside else key
        if key not in data:
            raise UserError(f"{where} is of no run: it has no {name!r}")
        if not isinstance(kind, Kind):
            check(where, data[key], kind, name)
        elif not kind.fits(data[key]):
            raise UserError(f"{where} is of no run: {name!r} is not {kind.words}")
