"""What a run names as its target, and whether it is held.

A target is a loss, a metric, both of them, a number of parameters, or a work per token. Plain
training names none.
"""

import math
import statistics
from collections.abc import Sequence

from gaugelasso.report.costs import work_format
from gaugelasso.report.formats import DASH, count, figure, known, metric_format, short
from gaugelasso.report.outcome import loss_name, outcome
from gaugelasso.report.run import Run
from gaugelasso.runs.reading import LAST_BATCHES, LOSS_ON_BATCHES
from gaugelasso.runs.units import noun, unit

_NOTHING_NAMED = "No target is named"


def _named(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What is named, and its value; empty if nothing is, or without runs.

    Seeds that measured their own loss may have different ones.
    """
    if not runs:
        return []
    run, named = runs[0], []
    if losses := [run.loss_target for run in runs if run.loss_target is not None]:
        low, high = f"{min(losses):g}", f"{max(losses):g}"
        named.append(("loss target", low if low == high else f"{low} to {high}"))
    if (metric := run.metric_target) is not None:
        value = metric_format(run.metric_name, digits=3)(metric)
        named.append((f"{run.metric_name} target", value))
    if (parameters := run.parameter_target) is not None:
        named.append(("parameter target", count(parameters)))
    if run.fma_target and run.parameter_target is None:
        form = work_format(run.accounting)
        named.append(("work target", f"{form(run.fma_target)} {noun(run.accounting)}"))
    if not named and run.config["target"].get("above_full") is not None:
        named.append(("loss target", "not measured yet"))
    return named


def names_target(run: Run) -> bool:
    """Whether a run names anything that it can hold or miss."""
    return bool(_named([run]))


def target_kinds(run: Run) -> str:
    """What a run names, in a word or two, as in "loss" or "loss, accuracy"; empty if nothing."""
    names = (name.removesuffix(" target") for name, _ in _named([run]))
    return ", ".join("parameters" if name == "parameter" else name for name in names)


def goal(runs: Sequence[Run]) -> str:
    """The target of a condition, as in "loss target 0.05"."""
    # CoFi to a number of parameters has a target that only its summary knows.
    return " and ".join(f"{noun} {value}" for noun, value in _named(runs)) or "no loss target"


def goal_cell(runs: Sequence[Run]) -> str:
    """The same in a table, where a number alone is a loss; a dash if nothing is named."""
    return goal(runs).removeprefix("loss target ") if _named(runs) else DASH


def is_held(run: Run) -> bool:
    """Whether a finished run has what it names."""
    if run.loss_target is None or run.metric_target is not None:
        return bool((run.summary or {}).get("held", False))
    return _is_within_loss(run) and _is_within_work(run)


def _is_within_loss(run: Run) -> bool:
    """Whether the loss is within the one that is named."""
    loss, target = outcome(run).loss, run.loss_target
    return loss is not None and target is not None and loss <= target


def _is_within_work(run: Run) -> bool:
    """Whether the work is within the one that is named, if one is."""
    return not run.fma_target or outcome(run).fma_final <= run.fma_target


def misses_only_work(runs: Sequence[Run]) -> bool:
    """Whether the median seed has the target loss, and not the work that is named with it."""
    named = runs[0].loss_target is not None and runs[0].fma_target
    return bool(named) and statistics.median_low(
        _is_within_loss(run) and not _is_within_work(run) for run in runs
    )


def _meets_metric(run: Run) -> bool:
    """Whether the metric on selection data is as named."""
    found, target = (run.summary or {}).get("selection_metric"), run.metric_target
    if found is None or target is None:
        return False
    return bool(found <= target if run.metric_lower_is_better else found >= target)


def is_mostly_held(runs: Sequence[Run]) -> bool:
    """Whether the median seed has what it names."""
    above = [(outcome(run).loss, run.loss_target) for run in runs]
    alone = runs[0].metric_target is None and not runs[0].fma_target
    if any(target is None for _, target in above) or not alone:
        return statistics.median_low(map(is_held, runs))
    return statistics.median(math.inf if a is None else a - (b or 0.0) for a, b in above) <= 0


def share_held(runs: Sequence[Run]) -> str:
    """A sentence on how many of the finished seeds hold their target."""
    held, named = sum(map(is_held, runs)), _named(runs)
    if not named:
        return f"{_NOTHING_NAMED}."
    place = LAST_BATCHES if loss_name(runs) == LOSS_ON_BATCHES else "held-out data"
    where = "" if named[0][0] in ("work target", "parameter target") else f" on {place}"
    targets = " and ".join(f"the {noun} of {value}" for noun, value in named)
    return f"{held} of {len(runs)} {runs[0].told_by}s end within {targets}{where}."


def _reference(run: Run) -> str:
    """Where a loss target comes from that refers to the full model."""
    if (found := (run.summary or {}).get("reference")) is None:
        return ""
    work = known(found["training_fma"], short)
    return f" Loss target: {found['named']}, with a training work of {work}."


def ending(run: Run) -> str:
    """A sentence on how a finished run ended."""
    end = outcome(run)
    loss = f"{loss_name([run])} {known(end.loss, figure)}"
    if run.loss_target is not None:
        target = f"the loss target of {run.loss_target:g}"
        place = "within" if _is_within_loss(run) else "above"
        told = f"{loss[0].upper()}{loss[1:]}, {place} {target}"
        if end.reached_step is None and not _is_within_loss(run):
            told = f"The training loss never reached {target}; {loss}"
        metric = "" if run.metric_target is None else f"; {_metric_ending(run)}"
        work = f"; {_work_ending(run)}" if run.fma_target else ""
        return f"{told}{metric}{work}.{_reference(run)}"
    if run.metric_target is not None:
        return f"{_metric_ending(run)}, {loss}."
    if run.parameter_target is not None:
        return f"{_parameter_ending(run, run.parameter_target)}; {loss}."
    if not names_target(run):
        return f"{_NOTHING_NAMED}; {loss}."
    return f"{_work_ending(run)}; {loss}."


def _work_ending(run: Run) -> str:
    """The work that is left, and whether it is within the one that is named."""
    # Alone it decides, and the method may allow a little more than is named.
    alone = run.loss_target is None
    within = is_held(run) if alone else _is_within_work(run)
    place, form = "within" if within else "above", work_format(run.accounting)
    return (
        f"{form(outcome(run).fma_final)} {unit(run.accounting)}, {place} the work target of "
        f"{form(run.fma_target)}"
    )


def _parameter_ending(run: Run, target: float) -> str:
    """How many parameters are left; a control that moves around its target may end above it."""
    reached, verb = (run.summary or {})["cofi"]["reached"], "meets" if is_held(run) else "misses"
    return (
        f"{count(reached)} parameters without the tables of the embedding, which {verb} the target "
        f"of {count(target)}"
    )


def _metric_ending(run: Run) -> str:
    """How the metric ended, on selection data, which decide, and on what else was measured."""
    form = metric_format(run.metric_name, digits=3)
    selection = known((run.summary or {}).get("selection_metric"), form)
    verb = "meets" if _meets_metric(run) else "misses"
    # A loop of the user's own has one measurement, and says where it was made.
    where = (run.summary or {}).get("evaluated_on", "test")
    decides = "selection data" if where == "test" else where
    told = (
        f"{run.metric_name} {selection} on {decides}, which {verb} the target of "
        f"{known(run.metric_target, form)}"
    )
    return f"{told}; {known(outcome(run).metric, form)} on test data" if where == "test" else told
