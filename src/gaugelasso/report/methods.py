"""Which method a run is of, under which conditions, and whether it has what it names.

The family of a run follows from its summary and its config, so that it is the same whatever it is
compared with. Only plain training needs the others: it is of the full model, or of a smaller one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gaugelasso.report.data import condition_labels, settings
from gaugelasso.report.goal import is_held
from gaugelasso.report.run import Run

OWN, EXCHANGE = "gaugelasso", "exchange"
FULL, UNIFORM = "full", "uniform"
_COMPRESSION, _PLAIN = "compression", "plain"
# Training without pressure has nothing to hold: the target in its config is a number to pass.
_WITHOUT_TARGET = (_PLAIN, "from scratch")
# The tables of a summary that hold the options of a method, and with them what it found.
_OPTIONS = ("pruning", "cofi", "torch_pruning")
_FOUND = {
    "rounds_made", "version", "reached", "masks", "lambda_1", "lambda_2", "lambda_1_per_1000_steps",
}  # fmt: skip
# Settings that such a method sets from its options.
_SET_BY_OPTIONS = ("target.", "train.steps", "train.warmup", "train.cooldown", "train.saturation")


def families(runs: Sequence[Run], starts: Sequence[float]) -> list[str]:
    """The family of each run. `starts` are their works before training, in one accounting."""
    begun = [
        work
        for run, work in zip(runs, starts, strict=True)
        if _method(run) not in _WITHOUT_TARGET
    ]  # fmt: skip
    full = max(begun, default=None)
    return [_family(run, work, full) for run, work in zip(runs, starts, strict=True)]


def _family(run: Run, start: float, full: float | None) -> str:
    method = _method(run)
    if method == _COMPRESSION:
        return EXCHANGE if run.config["compress"].get("exchange") else OWN
    if method == _PLAIN and full is not None:
        return UNIFORM if start < full else FULL
    if method == "cofi" and options(run).get("objective") == "parameters":
        return "cofi-parameters"
    return method


def names(runs: Sequence[Run], of: Sequence[str]) -> list[str]:
    """The name of each run's method: its family, with what differs where a family has several."""
    found = list(of)
    for family in dict.fromkeys(of):
        places = [place for place, each in enumerate(of) if each == family]
        labels = condition_labels([runs[place] for place in places], conditions)
        if len(set(labels)) > 1:
            for place, label in zip(places, labels, strict=True):
                found[place] = f"{family} ({label})"
    return found


def conditions(run: Run) -> dict[str, Any]:
    """All that changes the result of a run except its seed: settings, and the method's options."""
    given, found = options(run), settings(run)
    if given:
        found = {k: v for k, v in found.items() if not k.startswith(_SET_BY_OPTIONS)}
    source = (run.summary or {}).get("source", {})
    if source.get("method") == _PLAIN:  # how long the model was trained that the method began with
        given["source.steps"] = source.get("steps")
    return found | given


def options(run: Run) -> dict[str, Any]:
    """The options of a method that has its own, by their names; else empty."""
    tables: list[Mapping[str, Any]] = [(run.summary or {}).get(key, {}) for key in _OPTIONS]
    return {key: v for table in tables for key, v in table.items() if key not in _FOUND}


def held(run: Run) -> bool | None:
    """Whether a finished run has what it names; None if its method names nothing."""
    if _method(run) in _WITHOUT_TARGET:
        return None
    return is_held(run)


def _method(run: Run) -> str:
    """As the summary has it; early versions had compression alone."""
    return str((run.summary or {}).get("method", _COMPRESSION))
