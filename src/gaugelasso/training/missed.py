"""What a run that missed its target says: what was named, what came out, which key to change."""

from typing import Any

from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.runs.units import amount
from gaugelasso.training.records import RunRecord


def missed_message(
    record: RunRecord, summary: dict[str, Any], checkpoints: str, lower_is_better: bool = False
) -> str:
    """For a run that missed its target; `lower_is_better` is the direction of its metric."""
    named, loss = summary["loss_target"], summary["loss"]
    if misses_work(summary) and (named is None or (loss is not None and loss <= named)):
        return _work_missed_message(summary, checkpoints)
    if "metric_target" in summary:
        return _metric_missed_message(summary, checkpoints, lower_is_better)
    full = summary["fma_final"] == summary["fma_initial"]
    kept = "nothing was compressed, the full model" if full else "the model as it ended"
    best, target = record.best_loss, summary["loss_target"]
    missed = "never reached" if best is None or best > target else "missed"
    key, named = "target.loss", f"target.loss = {target}"
    if reference := summary.get("reference"):
        key, named = "target.above_full", f"the loss ({reference['named']})"
    if misses_work(summary):
        over = f"above target.fma = {summary['fma_target']:g} as well"
        kept = f"the model of {_final_work(summary)}, {over},"
    return (
        f"{named} was {missed} in {summary['steps']} steps (held-out loss "
        f"{_shown(summary['loss'])}, best training loss {_shown(best)}): {kept} is in "
        f"{checkpoints!r}. Raise {key} or train.steps, or try another compress.lr"
    )


def misses_work(summary: dict[str, Any]) -> bool:
    """Whether a work is named, alone or with a loss, and the final model is above it."""
    work = summary.get("fma_target")
    return work is not None and bool(summary["fma_final"] > work)


def _work_missed_message(summary: dict[str, Any], checkpoints: str) -> str:
    return (
        f"target.fma = {summary['fma_target']:g} was not reached in {summary['steps']} steps: the "
        f"model ends at {_final_work(summary)} with a held-out loss of "
        f"{_shown(summary['loss'])} and is in {checkpoints!r}. Raise target.fma or train.steps"
    )


def _metric_missed_message(summary: dict[str, Any], checkpoints: str, lower_is_better: bool) -> str:
    """Names the metric, the loss beside it, or both: what was missed."""
    name, reached = summary["metric"]["name"], summary["selection_metric"]
    reach = MetricTarget(summary["metric_target"], lower_is_better)
    loss, named = summary["loss"], summary["loss_target"]
    missed = {}
    if named is not None and (loss is None or loss > named):
        missed["target.loss"] = f"{named:g}"
    if reached is None or not reach.is_met(reached):
        missed["target.metric"] = f"{reach.value:g}"
    targets = " and ".join(f"{key} = {value}" for key, value in missed.items())
    return (
        f"{targets} {'was' if len(missed) == 1 else 'were'} missed in {summary['steps']} steps: "
        f"{name} is {_shown(reached)} on selection data, with a held-out loss of "
        f"{_shown(loss)}; the model of {_final_work(summary)} is in "
        f"{checkpoints!r}. Name another {' and '.join(missed)}, or raise train.steps"
    )


def _final_work(summary: dict[str, Any]) -> str:
    return amount(summary["fma_final"], summary["accounting"])


def _shown(loss: float | None) -> str:
    return "not a finite number" if loss is None else f"{loss:.4g}"
