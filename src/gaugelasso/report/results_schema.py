"""The schema of results files, of sweeps, of comparisons and of benchmarks, checked when read.

An error names the file, the run and the key. Keys that no table reads are ignored.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.report.schema import (
    FIGURES,
    FINITE,
    NAMED,
    TEXT,
    WHOLE,
    WORD,
    Kind,
    Schema,
    check_keys,
)
from gaugelasso.runs.reading import OWN_LOOP

_ORIGIN: Schema = {"hardware": WORD, "date": WORD}
_RUN: Schema = {
    "seed": WHOLE, "fma_final": FINITE, "loss": NAMED, "metric": NAMED, "training_fma": NAMED,
    "wall_s": NAMED,
}  # fmt: skip
_LIST = Kind("a list", lambda value: isinstance(value, list))
_FLAG = Kind("true, false or null", lambda value: value is None or isinstance(value, bool))
_CONTROL: Schema = {
    "objective": TEXT, "target": FINITE, "reached": FINITE, "masks": FIGURES, "lambda_1": FINITE,
    "lambda_2": FINITE, "lambda_1_per_1000_steps": NAMED,
}  # fmt: skip
# Keys that files of early versions, or of other methods, do not have; null where not measured.
_OPTIONAL: Schema = {
    "method": TEXT, "family": TEXT, "steps": WHOLE, "fma_initial": NAMED, "compression": NAMED,
    "held": _FLAG, "target_reached_step": NAMED, "parameters_final": NAMED, "ms": NAMED,
    "work_target": NAMED,
    "parameters_without_embedding_initial": NAMED, "parameters_without_embedding": NAMED,
}  # fmt: skip
_TABLES: Mapping[str, Schema] = {
    "before_cooldown": {"loss": NAMED, "metric": NAMED, "fma": NAMED},
    "structure": {},
    "attentions": {"initial": WHOLE, "full_width": WHOLE},
    "cofi": _CONTROL,
    "training_work": {"own": NAMED, "before": NAMED, "total": NAMED},
    "source": {"steps": NAMED, "training_fma": NAMED},
}
_METHOD: Schema = {"method": TEXT, "family": TEXT, "conditions": {}}


def check_results(path: Path, data: Any) -> dict[str, Any]:
    """Returns the content of a results file; UserError, naming file and key, if it is not one.

    A file in a folder "controls" is named by its task, as results/controls/retrieval.json is.
    """
    source = repr(str(path))
    check_keys(source, data, _ORIGIN)
    found: dict[str, Any] = data
    for key in ("command", "commit", "compare_command"):
        if not WORD.fits(found.get(key)):
            raise UserError(f"{source}: {key!r} is not {WORD.description}")
    if not any(key in found for key in ("runs", "arms", "rows")):
        raise UserError(f"{source}: key 'runs' is missing (or 'arms' of a sweep, 'rows' of bench)")
    for number, row in enumerate(_list(source, found, "rows")):
        check_keys(f"rows[{number}] of {source}", row, {"work": TEXT})
    for number, arm in enumerate(_list(source, found, "arms")):
        where = f"arms[{number}] of {source}"
        check_keys(where, arm, {"name": TEXT, "runs": _LIST})
        _check_runs(where, arm["runs"])
    if "rows" not in found:  # the runs of a file of bench are timings
        # Those of own loops are not known.
        _check_runs(source, _list(source, found, "runs"), found.get("task") != OWN_LOOP)
    _check_methods(source, found)
    check_place(path, found.get("task", path.stem))
    return found


def check_place(path: Path, task: str) -> None:
    """UserError if a results file of this task belongs somewhere else."""
    if path.parent.name == "controls" and task != path.stem:
        raise UserError(f"{str(path)!r}: its runs are of task {task!r}; write it to {task}.json")


def _list(source: str, data: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = data.get(key, [])
    if not isinstance(found, list):
        raise UserError(f"{source}: {key!r} is not a list")
    return found


def _check_runs(source: str, runs: Sequence[Any], seeds_known: bool = True) -> None:
    seen: set[tuple[str | None, int]] = set()
    for number, run in enumerate(runs):
        where = f"runs[{number}] of {source}"
        check_keys(where, run, _RUN)
        check_keys(where, run, {key: kind for key, kind in _OPTIONAL.items() if key in run})
        for key, schema in _TABLES.items():
            if run.get(key) is not None:
                check_keys(where, run[key], schema, key)
        if seeds_known and (place := (run.get("method"), run["seed"])) in seen:
            method = f" of method {place[0]!r}" if place[0] else ""
            raise UserError(f"{where}: a second run{method} with seed {place[1]}; keep one of them")
        seen.add((run.get("method"), run["seed"]))


def _check_methods(source: str, data: Mapping[str, Any]) -> None:
    """`methods` of a comparison describes the method of every run."""
    if not (methods := _list(source, data, "methods")):
        return
    for number, each in enumerate(methods):
        check_keys(f"methods[{number}] of {source}", each, _METHOD)
    known = {each["method"] for each in methods}
    for number, run in enumerate(data.get("runs", [])):
        if run.get("method") not in known:
            raise UserError(
                f"runs[{number}] of {source}: method {run.get('method')!r} is not one of 'methods'"
            )
