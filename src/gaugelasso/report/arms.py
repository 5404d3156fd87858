"""Arms side by side: one row a condition, before cooldown and at the end."""

from collections.abc import Iterable, Sequence
from typing import Any

from gaugelasso.report import words
from gaugelasso.report.data import Condition, outcome
from gaugelasso.report.layout import Table
from gaugelasso.report.results import origin


def arms_table(arms: Sequence[Condition], results: dict[str, Any]) -> Table:
    """Means over the seeds of each arm, and how many of these held the loss target.

    `results` are those of `collect_arms`: they say where the figures come from.
    """
    name = metric_name(arms)
    # One digit more than elsewhere: arms may differ in it alone.
    score = words.metric_format(name, digits=3)
    rows = []
    for arm in arms:
        ends = [outcome(run) for run in arm.runs]
        before = [run.before_cooldown or {} for run in arm.runs]
        target = arm.runs[0].loss_target
        held = sum(end.loss is not None and end.loss <= target for end in ends)
        rows.append([
            arm.name,
            words.over_seeds([end.fma_final for end in ends], words.count),
            _mean((end.compression for end in ends), words.ratio),
            _mean((row.get("loss") for row in before), words.figure),
            _mean((end.loss for end in ends), words.figure),
            _mean((row.get("metric") for row in before), score),
            _mean((end.metric for end in ends), score),
            f"{held}/{arm.asked}",
        ])  # fmt: skip
    headers = ["arm", "FMA after", "compression", "loss before cooldown", "loss"]
    headers += [f"{name} before cooldown", name, "held target"]
    note = "Means, of FMA with standard deviation. Loss before cooldown: of training, at the last "
    note += "row of compression. "
    missing = [arm.name for arm in arms if len(arm.runs) < arm.asked]
    if missing:
        note += f"Runs are missing, and held nothing, in: {', '.join(missing)}. "
    return Table("Arms", headers, rows, note + origin(results))


def metric_name(arms: Sequence[Condition]) -> str:
    """The name that all arms share, or "metric"."""
    names = {run.metric_name for arm in arms for run in arm.runs}
    return names.pop() if len(names) == 1 else "metric"


def _mean(values: Iterable[float | None], form: words.Format) -> str:
    return words.mean_std(list(values), form)[0]
