"""The two sentences that sum up a run or the seeds of one condition."""

import statistics
from collections.abc import Sequence

from gaugelasso.report.costs import work_format
from gaugelasso.report.formats import DASH, mean_std, metric_format, ratio
from gaugelasso.report.goal import ending, is_held, names_target, share_held
from gaugelasso.report.outcome import outcome
from gaugelasso.report.run import Run
from gaugelasso.runs.units import gained, unit


def headline(runs: Sequence[Run]) -> str:
    """The result in one sentence: work before and after, ratio, metric."""
    ends = [outcome(run) for run in runs]
    before = statistics.fmean(end.fma_initial for end in ends)
    after = statistics.fmean(end.fma_final for end in ends)
    compression = statistics.fmean(end.compression for end in ends)
    accounting = runs[0].accounting
    gain = gained(accounting)
    size = f"{ratio(compression)} {gain}" if compression > 1 else f"not {gain}"
    form = work_format(accounting)
    text = f"{form(before)} → {form(after)} {unit(accounting)}: {size}"
    name = runs[0].metric_name
    metric, _ = mean_std([end.metric for end in ends], metric_format(name))
    if metric != DASH:
        text += f" at {metric} {name}"
    return text if len(runs) == 1 else f"{text} (means of {len(runs)} {runs[0].told_by}s)"


def verdict(runs: Sequence[Run]) -> tuple[bool | None, str]:
    """Whether the target is held (None: not finished, or no target), and a sentence about it."""
    ends = [outcome(run) for run in runs]
    unfinished = sum(not end.finished for end in ends)
    if unfinished:
        if len(runs) == 1:
            planned = runs[0].config["train"]["steps"]
            return None, f"Not finished: step {ends[0].steps:,} of at most {planned:,}."
        return None, f"{unfinished} of {len(runs)} runs are not finished; figures are preliminary."
    held = [is_held(run) if names_target(run) else None for run in runs]
    if len(runs) == 1:
        return held[0], ending(runs[0])
    return None if None in held else all(held), share_held(runs)
