"""The training work behind a model: that of its own run, and that of the runs that it needs.

`training_fma` of a summary does not compare methods: a run with target.above_full needs a full
model, and a structure that is trained from scratch was found by a run before. `training_work` does.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.runs.reading import exists, is_imported, read_json
from gaugelasso.runs.units import training_accounting

TRAINING_WORK = "training_work"
BEGUN = "the run that it began with"  # what a rival needs


def training_work(own: float, before: float | None, needs: str | None) -> dict[str, Any]:
    """The entry of summary.json, in FMA; `before` is None if that work is not known."""
    total = None if before is None else own + before
    return {TRAINING_WORK: {"own": own, "before": before, "total": total, "needs": needs}}


def entry_of(
    summary: Mapping[str, Any],
    found: float | None = None,
    weights: Mapping[str, float | None] | None = None,
) -> dict[str, Any]:
    """The entry of a run of the trainer, of its other figures.

    `found` is the training work behind a structure that the run was given, if it is known.
    `weights` has that of the runs whose weights it takes. Beside a structure it is not known what
    both needed, and would count twice.
    """
    needed = dict.fromkeys(weights or {}) if found is not None else dict(weights or {})
    if (reference := summary.get("reference")) is not None:
        needed["the full model of target.above_full"] = reference["training_fma"]
    if found is not None or summary.get("method") == "from scratch":
        needed["the run that found the structure"] = found
    works = [work for work in needed.values() if work is not None]
    before = sum(works) if len(works) == len(needed) else None
    return training_work(summary["training_fma"], before, " and ".join(needed) or None)


def entry_in(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The entry that a summary has: `own`, `before`, `total` and `needs`.

    Summaries of older versions have none, and it follows from what they have.
    """
    if TRAINING_WORK in summary:
        return dict(summary[TRAINING_WORK])
    if summary["training_fma"] is None:
        return {"own": None, "before": None, "total": None, "needs": None}
    if (source := summary.get("source")) is None:
        return dict(entry_of(summary)[TRAINING_WORK])
    # A rival, whose figure includes the full model.
    total, before = summary["training_fma"], source.get("training_fma")
    own = None if before is None else total - before
    return {"own": own, "before": before, "total": total, "needs": BEGUN}


def total_training(summary: Mapping[str, Any]) -> float | None:
    """FMA of the training of a run and of the runs that it needs; None if it is not known."""
    total = entry_in(summary)["total"]
    return None if total is None else float(total)


def behind_weights(folders: Mapping[str, Path], accounting: str) -> dict[str, float | None]:
    """The training work of those folders that are runs, by what they are; None if not known.

    An imported model is no run: what was spent on it is known to nobody.
    """
    runs = {what: folder for what, folder in folders.items() if not is_imported(folder)}
    return {what: _counted_in(folder, accounting) for what, folder in runs.items()}


def _counted_in(run: Path, accounting: str) -> float | None:
    """Of a run and of those that it needs; None if unfinished, or of another accounting."""
    path = run / "summary.json"
    summary = read_json(path) if exists(path) else {}
    counted = training_accounting(str(summary.get("accounting")))
    if counted != training_accounting(accounting) or "training_fma" not in summary:
        return None
    total = entry_in(summary).get("total")
    return float(total) if isinstance(total, int | float) and math.isfinite(total) else None


def behind_structure(path: Path, data: Mapping[str, Any]) -> float | None:
    """The training work that a file with a structure says was needed to find it, if it says so."""
    if TRAINING_WORK not in data:
        return None
    entry = data[TRAINING_WORK]
    total = entry.get("total", math.nan) if isinstance(entry, dict) else math.nan
    if total is None:
        return None
    if type(total) not in (int, float) or not 0 <= total < math.inf:
        raise UserError(f"{str(path)!r}: {TRAINING_WORK}.total is not a number of 0 or more")
    return float(total)
