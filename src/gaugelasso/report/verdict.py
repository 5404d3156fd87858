"""The two sentences that sum up a run or the seeds of one condition."""

import statistics
from collections.abc import Sequence

from gaugelasso.report.formats import DASH, count, figure, known, mean_std, metric_format, ratio
from gaugelasso.report.outcome import outcome
from gaugelasso.report.run import Run


def headline(runs: Sequence[Run]) -> str:
    """The result in one sentence: work before and after, ratio, metric."""
    ends = [outcome(run) for run in runs]
    before = statistics.fmean(end.fma_initial for end in ends)
    after = statistics.fmean(end.fma_final for end in ends)
    compression = statistics.fmean(end.compression for end in ends)
    size = f"{ratio(compression)} smaller" if compression > 1 else "not smaller"
    text = f"{count(before)} → {count(after)} FMA per token: {size}"
    name = runs[0].metric_name
    metric, _ = mean_std([end.metric for end in ends], metric_format(name))
    if metric != DASH:
        text += f" at {metric} {name}"
    return text if len(runs) == 1 else f"{text} (means of {len(runs)} seeds)"


def verdict(runs: Sequence[Run]) -> tuple[bool | None, str]:
    """Whether the final loss meets its target (None: not finished), and a sentence about it."""
    target = f"the loss target of {runs[0].loss_target:g}"
    ends = [outcome(run) for run in runs]
    unfinished = sum(not end.finished for end in ends)
    if unfinished:
        if len(runs) == 1:
            planned = runs[0].config["train"]["steps"]
            return None, f"Not finished: step {ends[0].steps:,} of at most {planned:,}."
        return None, f"{unfinished} of {len(runs)} runs are not finished; figures are preliminary."
    held = [end.loss is not None and end.loss <= runs[0].loss_target for end in ends]
    if len(runs) > 1:
        return all(held), f"{sum(held)} of {len(runs)} seeds end within {target} on held-out data."
    loss = known(ends[0].loss, figure)
    if ends[0].reached_step is None:
        return False, f"The training loss never reached {target}; held-out loss {loss}."
    place = "within" if held[0] else "above"
    return held[0], f"Held-out loss {loss}, {place} {target}."
