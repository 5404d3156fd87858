"""The table that compares arms: one row per condition, before cooldown and at the end."""

from collections.abc import Iterable, Sequence
from typing import Any

from gaugelasso.report import formats
from gaugelasso.report.costs import work_format
from gaugelasso.report.data import Condition
from gaugelasso.report.goal import is_held, names_target
from gaugelasso.report.layout import Table
from gaugelasso.report.outcome import common_metric, outcome
from gaugelasso.report.results import origin
from gaugelasso.runs.units import noun


def arms_table(arms: Sequence[Condition], results: dict[str, Any]) -> Table:
    """Means over the seeds of each arm, and how many seeds met their target.

    `results` comes from `collect_arms`; it gives commit, hardware and date for the note.
    """
    name, counted = metric_name(arms), arms[0].runs[0].accounting if arms[0].runs else "fma"
    # One digit more than in other tables: arms may differ only there.
    score = formats.metric_format(name, digits=3)
    rows = []
    for arm in arms:
        ends = [outcome(run) for run in arm.runs]
        before = [run.before_cooldown or {} for run in arm.runs]
        named = not arm.runs or all(map(names_target, arm.runs))
        held = sum(map(is_held, arm.runs))
        within = f"{held}/{arm.seeds_requested}" if named else formats.DASH
        rows.append([
            arm.name,
            formats.over_seeds([end.fma_final for end in ends], work_format(counted)),
            _mean((end.compression for end in ends), formats.ratio),
            _mean((row.get("loss") for row in before), formats.figure),
            _mean((end.loss for end in ends), formats.figure),
            _mean((row.get("metric") for row in before), score),
            _mean((end.metric for end in ends), score),
            within,
        ])  # fmt: skip
    headers = ["arm", f"{noun(counted)} after", "compression", "loss before cooldown", "loss"]
    headers += [f"{name} before cooldown", name, "within target"]
    note = f"Means over seeds; {noun(counted)} with standard deviation. Loss before cooldown: the "
    note += "training loss in the last row of the compression phase. "
    missing = [arm.name for arm in arms if len(arm.runs) < arm.seeds_requested]
    if missing:
        note += f"Runs are missing, and count as not within the target, in: {', '.join(missing)}. "
    return Table("Arms", headers, rows, note + origin(results))


def metric_name(arms: Sequence[Condition]) -> str:
    """The metric's name if all arms have the same, otherwise "metric"."""
    return common_metric([run for arm in arms for run in arm.runs]) or "metric"


def _mean(values: Iterable[float | None], form: formats.Format) -> str:
    return formats.mean_std(list(values), form)[0]
