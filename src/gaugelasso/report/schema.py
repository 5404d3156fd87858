"""The schema of a run's files, checked once, when they are read.

An error names the file and the first key that is wrong, so code that prints or draws need not
check again. Keys that no report reads are ignored.
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
    """A requirement on a value: its description for error messages, and the test."""

    description: str
    fits: Callable[[Any], bool]


# Key -> requirement on its value: a kind, or the schema of a nested table.
Schema = Mapping[str, "Kind | Schema"]


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


def _is_served(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("at"), dict):
        return False
    texts = [value.get(key) for key in ("model", "form", "device")] + [value["at"].get("hardware")]
    times = [value.get(key) for key in ("latency_ms", "batch_ms")]
    sizes = [value.get(key) for key in ("batch", "length")]
    return (
        all(isinstance(each, str) for each in texts)
        and all(map(_is_finite, times))
        and all(map(_is_whole, sizes))
        and type(value.get("decode")) is bool
    )


def _is_channel(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("axis"), str)
        and all(_is_finite(value.get(key)) for key in ("index", "price", "utility_per_fma"))
    )


def _are_costs(value: Any) -> bool:
    if not isinstance(value, dict) or not all(
        isinstance(v, str | int | float) for v in value.values()
    ):
        return False
    return all(_is_finite(value[key]) for key in ("fma", "bytes", "ms") if key in value)


TEXT = Kind("a string", lambda value: isinstance(value, str))
WORD = Kind("a string or null", lambda value: value is None or TEXT.fits(value))
VERDICT = Kind("true, false or null", lambda value: value is None or isinstance(value, bool))
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
WHOLE = Kind("a whole number", _is_whole)
STEP = Kind("a whole number or null", lambda value: value is None or _is_whole(value))
POSITIVE = Kind("a whole number above 0", lambda value: _is_whole(value) and value > 0)
FINITE = Kind("a finite number", _is_finite)
# A target that is null if another key says what is wanted.
NAMED = Kind("a finite number or null", lambda value: value is None or _is_finite(value))
WORK = Kind("a finite number above 0", lambda value: _is_finite(value) and value > 0)
# A measurement: null if it was not taken yet, and possibly not finite.
FIGURE = Kind("a number or null", _is_figure)
FIGURES = Kind("a table of numbers", _table_of(_is_figure))
COUNTS = Kind("a table of whole numbers", _table_of(_is_whole))
WIDTHS = Kind(
    "a table of widths with the residual sites D",
    lambda value: COUNTS.fits(value) and value.get("D", 0) > 0,
)
NAMES = Kind("a list of strings", _list_of(TEXT.fits))
COSTS = Kind("a table of costs and what they are of", _are_costs)
SCHEDULE = Kind(
    "a table of steps and warmup, or null",
    lambda value: value is None or (COUNTS.fits(value) and {"steps", "warmup"} <= value.keys()),
)
OPERATORS = Kind("a list of operators", _list_of(_is_operator))
CHANNELS = Kind("a list of channels", _list_of(_is_channel))

_REQUIRED: Mapping[str, Schema] = {
    "config.json": {
        **{section: {} for section in CONFIG_SECTIONS},
        "target": {"loss": NAMED},
        "compress": {"accounting": TEXT},
        "train": {"seed": WHOLE, "steps": WHOLE, "eval_every": POSITIVE},
    },
    "environment.json": {"date": TEXT},
    "initial.json": {"fma": WORK, "widths": WIDTHS},
    "serving.json": {
        "inference": Kind("a list of rows of bench --inference", _list_of(_is_served)),
    },
    "original.json": {"test": {"loss": WORK, "bits": WORK}, "metric": TEXT},
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
# Targets beside the loss, which early versions did not have.
_TARGETS: Schema = {"metric": NAMED, "fma": FINITE, "above_full": NAMED, "reference_loss": NAMED}
# Keys that early builds did not write, or that not every task has.
_ENVIRONMENT: Schema = {"command": WORD, "commit": WORD, "hardware": WORD}
_OPTIONAL: Mapping[str, Schema] = {
    "environment.json": _ENVIRONMENT,
    "resumed.jsonl": _ENVIRONMENT,
    "initial.json": {
        "structure": {"layers": WHOLE, "operators": OPERATORS},
        "metric": {"name": TEXT, "lower_is_better": SWITCH},
        "costs": COSTS,
    },
    "events.jsonl": {
        "loss_before": FIGURE, "loss_balanced": FIGURE, "loss_after": FIGURE, "undone": FIGURES,
        "exchanged": COUNTS, "grown": COUNTS,
    },
    "summary.json": {
        "evaluated_on": TEXT, "figures": FIGURES, "returns": WHOLE, "skipped_steps": WHOLE,
        "next_to_go": CHANNELS, "costs": COSTS, "selection_metric": FIGURE,
        "reference": {"named": TEXT, "training_fma": FIGURE}, "method": TEXT,
        "training_work": {"own": FIGURE, "before": FIGURE, "total": FIGURE, "needs": WORD},
        "source": {"training_fma": FIGURE}, "pruning": {}, "torch_pruning": {},
        "selection_loss": FIGURE, "frozen_step": STEP, "held": VERDICT, "loss_target": FIGURE,
        "fma_target": FIGURE,
        "cofi": {"objective": TEXT, "target": FINITE, "reached": FINITE},
    },
}  # fmt: skip


# Of the run that a rival began with: early versions did not write all of it.
_SOURCE: Schema = {
    "run": TEXT, "method": WORD, "steps": WHOLE, "batches": WHOLE, "schedule": SCHEDULE,
}  # fmt: skip
# initial.json of a model that is not the built-in transformer.
_OWN_INITIAL: Schema = {
    "fma": WORK,
    "widths": Kind(
        "a table of widths, one of them above 0",
        lambda value: COUNTS.fits(value) and any(value.values()),
    ),
    "structure": {},
    "model_class": TEXT,
}


def checked(path: Path, data: Any) -> Any:
    """Returns the content of a run's file; UserError, naming the file, if a key is wrong."""
    return _checked(path.name, repr(str(path)), data)


def checked_rows(path: Path, rows: Iterable[Any]) -> Iterator[Any]:
    """Yields the rows of a log, each checked; steps must not decrease."""
    last = 0
    for number, row in enumerate(rows, start=1):
        source = f"line {number} of {str(path)!r}"
        step = _checked(path.name, source, row)["step"]
        if step < last:
            raise UserError(f"{source}: 'step' is smaller than in the line before")
        last = step
        yield row


def _checked(name: str, source: str, data: Any) -> Any:
    own = name == "initial.json" and isinstance(data, dict) and "model_class" in data
    required = _OWN_INITIAL if own else _REQUIRED[name]
    check_keys(source, data, required)
    if name == "config.json":
        key = "name" if "name" in data["task"] or "module" not in data["task"] else "module"
        check_keys(source, data["task"], {key: TEXT}, "task")
        _check_present(source, data["target"], _TARGETS, "target")
    optional = _OPTIONAL.get(name, {}).items()
    _check_present(source, data, {key: kind for key, kind in optional if key not in required})
    if name == "summary.json" and "source" in data:
        _check_present(source, data["source"], _SOURCE, "source")
    if name == "metrics.jsonl":
        # The other columns are numbers too; the name of the metric's column depends on the task.
        check_keys(source, data, dict.fromkeys(data.keys() - {"phase"}, FIGURE))
    return data


def _check_present(source: str, data: Any, schema: Schema, prefix: str = "") -> None:
    """As `check_keys`, of the keys that the table has."""
    given = {key: kind for key, kind in schema.items() if key in data}
    check_keys(source, data, given, prefix)


def check_keys(source: str, data: Any, schema: Schema, prefix: str = "") -> None:
    """UserError, naming `source`, unless `data` is a table that fits the schema."""
    if not isinstance(data, dict):
        raise UserError(f"{source}: {repr(prefix) if prefix else 'the content'} is not a table")
    for key, kind in schema.items():
        name = f"{prefix}.{key}" if prefix else key
        if key not in data:
            raise UserError(f"{source}: key {name!r} is missing")
        if not isinstance(kind, Kind):
            check_keys(source, data[key], kind, name)
        elif not kind.fits(data[key]):
            raise UserError(f"{source}: {name!r} is not {kind.description}")
