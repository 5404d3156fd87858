"""What a run names as its target: a loss, a metric or a work per token, and whether it is held."""

import math
import statistics
from collections.abc import Sequence

from gaugelasso.report.costs import work_format
from gaugelasso.report.formats import figure, known, metric_format, short
from gaugelasso.report.outcome import outcome
from gaugelasso.report.run import Run
from gaugelasso.runs.units import noun, unit


def _named(runs: Sequence[Run]) -> tuple[str, str]:
    """What is named, and its value; seeds that measured their own loss may have different ones."""
    run = runs[0]
    if (metric := run.metric_target) is not None:
        return f"{run.metric_name} target", metric_format(run.metric_name, digits=3)(metric)
    if (losses := [run.loss_target for run in runs if run.loss_target is not None]) != []:
        low, high = f"{min(losses):g}", f"{max(losses):g}"
        return "loss target", low if low == high else f"{low} to {high}"
    if run.fma_target:
        form = work_format(run.accounting)
        return "work target", f"{form(run.fma_target)} {noun(run.accounting)}"
    return "loss target", "not measured yet"


def goal(runs: Sequence[Run]) -> str:
    """The target of a condition, as in "loss target 0.05"."""
    return " ".join(_named(runs))


def goal_cell(runs: Sequence[Run]) -> str:
    """The same in a table, where a number alone is a loss."""
    return goal(runs).removeprefix("loss target ")


def is_held(run: Run) -> bool:
    """Whether a finished run has what it names."""
    if (target := run.loss_target) is None:
        return bool((run.summary or {}).get("held", False))
    loss = outcome(run).loss
    return loss is not None and loss <= target


def is_mostly_held(runs: Sequence[Run]) -> bool:
    """Whether the median seed has what it names."""
    above = [(outcome(run).loss, run.loss_target) for run in runs]
    if any(target is None for _, target in above):
        return statistics.median_low(map(is_held, runs))
    return statistics.median(math.inf if a is None else a - (b or 0.0) for a, b in above) <= 0


def share_held(runs: Sequence[Run]) -> str:
    """A sentence on how many of the finished seeds hold their target."""
    held, (noun, value) = sum(map(is_held, runs)), _named(runs)
    where = "" if noun == "work target" else " on held-out data"
    return f"{held} of {len(runs)} seeds end within the {noun} of {value}{where}."


def _reference(run: Run) -> str:
    """Where a loss target comes from that refers to the full model."""
    if (found := (run.summary or {}).get("reference")) is None:
        return ""
    work = known(found["training_fma"], short)
    return f" Loss target: {found['named']}, with a training work of {work}."


def ending(run: Run) -> str:
    """A sentence on how a finished run ended."""
    end, held = outcome(run), is_held(run)
    loss = known(end.loss, figure)
    if run.loss_target is not None:
        target = f"the loss target of {run.loss_target:g}"
        if end.reached_step is None:
            told = f"The training loss never reached {target}; held-out loss {loss}."
            return told + _reference(run)
        place = "within" if held else "above"
        return f"Held-out loss {loss}, {place} {target}.{_reference(run)}"
    if (metric := run.metric_target) is not None:
        form = metric_format(run.metric_name, digits=3)
        selection = known((run.summary or {}).get("selection_metric"), form)
        verb = "meets" if held else "misses"
        return (
            f"{run.metric_name} {selection} on selection data, which {verb} the target of "
            f"{form(metric)}; {known(end.metric, form)} on test data, held-out loss {loss}."
        )
    place, form = "within" if held else "above", work_format(run.accounting)
    return (
        f"{form(end.fma_final)} {unit(run.accounting)}, {place} the work target of "
        f"{form(run.fma_target)}; held-out loss {loss}."
    )
