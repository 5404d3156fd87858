"""The figures that a run is judged by: from its summary, or from its newest row before that."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gaugelasso.report.run import Run
from gaugelasso.runs.reading import LAST_BATCHES, LOSS_ON_BATCHES
from gaugelasso.runs.training_work import entry_in


@dataclass(frozen=True)
class Outcome:
    """The result of a run, or its current state.

    `loss` and `metric` are measured when the run is finished, on held-out data but for a loop
    without `evaluate` (`loss_name`). Before that `loss` is the training loss. `figures` are further
    results that the task measures at the end.

    `training_fma` and `wall_s` are of the run's own steps. `training_total` and `wall_total`
    include the runs that it `needs`, as the full model that a rival begins with.
    """

    finished: bool
    steps: int
    fma_initial: float
    fma_final: float
    parameters_initial: int | None
    parameters_final: int | None
    loss: float | None
    metric: float | None
    figures: Mapping[str, float]
    reached_step: int | None
    training_fma: float | None
    wall_s: float | None
    needs: str | None = None
    training_total: float | None = None
    wall_total: float | None = None
    returns: int = 0
    skipped: int = 0

    @property
    def compression(self) -> float:
        return self.fma_initial / self.fma_final if self.fma_final else math.inf


def outcome(run: Run) -> Outcome:
    """Read the summary of a finished run, or the newest row of a run in progress."""
    if (summary := run.summary) is not None:
        work = entry_in(summary)
        return Outcome(
            finished=True,
            steps=summary["steps"],
            fma_initial=summary["fma_initial"],
            fma_final=summary["fma_final"],
            parameters_initial=summary["parameters_initial"],
            parameters_final=summary["parameters_final"],
            loss=summary["loss"],
            metric=summary["metric"]["value"],
            figures=summary.get("figures", {}),
            reached_step=None if run.loss_target is None else summary["target_reached_step"],
            training_fma=work["own"],
            wall_s=_own_wall(summary),
            needs=work["needs"],
            training_total=work["total"],
            wall_total=summary["wall_s"] if "source" in summary else None,
            returns=summary.get("returns", 0),
            skipped=summary.get("skipped_steps", 0),
        )
    first: Mapping[str, Any] = run.metrics[0] if run.metrics else {}
    last: Mapping[str, Any] = run.metrics[-1] if run.metrics else {}
    # A first row that follows a drop holds a smaller number of parameters than the initial one.
    first_is_initial = first.get("fma") == run.initial["fma"]
    return Outcome(
        finished=False,
        steps=run.last_step,
        fma_initial=run.initial["fma"],
        fma_final=run.fma_trajectory()[1][-1],
        parameters_initial=first["parameters"] if first_is_initial else None,
        parameters_final=last.get("parameters"),
        loss=last.get("loss"),
        metric=last.get(run.metric_name),
        figures={},
        reached_step=None,
        training_fma=None,
        wall_s=last.get("wall_s"),
    )


def last_step_ms(run: Run) -> float | None:
    """Median step time in ms over the last rows; single rows may include a graph capture."""
    _, times = run.column("step_ms")
    some = min(10, max(1, len(times) // 4))
    return statistics.median(times[-some:]) if times else None


def loss_name(runs: Sequence[Run]) -> str:
    """What the loss of runs is called. A loop without `evaluate` has none on held-out data."""
    if not all(run.summary is not None for run in runs):
        return "training loss"
    on_batches = (runs[0].summary or {}).get("evaluated_on") == LAST_BATCHES
    return LOSS_ON_BATCHES if on_batches else "held-out loss"


def common_metric(runs: Sequence[Run]) -> str | None:
    """The metric of all runs; None if they do not have the same one, as own loops may."""
    names = {run.metric_name for run in runs}
    return names.pop() if len(names) == 1 else None


def _own_wall(summary: Mapping[str, Any]) -> float | None:
    """Seconds of the run itself: of a rival, `wall_s` includes the full model that it began with.

    None if either is not known.
    """
    if "source" not in summary or summary["wall_s"] is None:
        return summary["wall_s"]
    before = summary["source"].get("wall_s")
    return summary["wall_s"] - before if isinstance(before, int | float) else None
