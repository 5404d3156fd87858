"""The runs of a comparison: finished, of one task and the same data, evaluated on as much of it."""

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.report.data import check_finished, check_same, load_run, run_folders, settings
from gaugelasso.report.run import Run

_log = logging.getLogger(__name__)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs to compare; UserError unless all are finished, of one task, and evaluated alike."""
    runs = [load_run(folder) for folder in run_folders(paths)]
    if len(runs) < 2:
        raise UserError("compare needs two runs or more; give run folders, or folders with runs")
    check_finished(runs)
    # Where downloads are kept does not matter.
    shared = {key for run in runs for key in settings(run) if key.startswith("task.")}
    for before, run in pairwise(runs):
        check_same(before, run, "cannot be compared", only=shared - {"task.cache"})
        pair = f"{str(before.path)!r} and {str(run.path)!r} cannot be compared"
        for name in sorted({*_data(before), *_data(run)}):
            if _data(before).get(name) != _data(run).get(name):
                raise UserError(f"{pair}: their data differ ({name}, in initial.json)")
        parts = [(each.summary or {}).get("evaluated_on") for each in (before, run)]
        if parts[0] != parts[1]:
            raise UserError(f"{pair}: evaluated_on is {parts[0]!r} in one and {parts[1]!r} in the "
                            "other")  # fmt: skip
        loops = before.is_own_loop or run.is_own_loop  # they name the metric that they have
        if not loops and before.metric_name != run.metric_name:
            raise UserError(
                f"{pair}: the metric is {before.metric_name!r} in one and {run.metric_name!r} in "
                "the other"
            )
        if _code(before) != _code(run):
            _log.warning(
                "warning: the code of the task or model of %r and %r differs (environment.json), "
                "so that their figures may mean different things",
                str(before.path), str(run.path),
            )  # fmt: skip
    sizes = [(run, size) for run in runs if (size := _evaluated(run)) is not None]
    for (before, one), (run, other) in pairwise(sizes):
        if one != other:
            raise UserError(
                f"{str(before.path)!r} and {str(run.path)!r} cannot be compared: one is evaluated "
                f"on {one:,} sequences, the other on {other:,} (train.final_batches times "
                "train.batch); train one again with the other's settings"
            )
    return runs


def _code(run: Run) -> Mapping[str, Any]:
    """Digests of the files with a task or model of the user's own."""
    code = run.environment.get("code")
    return code if isinstance(code, dict) else {}


def _data(run: Run) -> Mapping[str, Any]:
    """Sizes and digests of the data that the task read from disk; empty if it read none."""
    data = run.initial.get("data")
    return data if isinstance(data, dict) else {}


def _evaluated(run: Run) -> int | None:
    """The sequences of the final evaluation; None if the config does not have their number."""
    batches, size = (run.config["train"].get(key) for key in ("final_batches", "batch"))
    return batches * size if isinstance(batches, int) and isinstance(size, int) else None
