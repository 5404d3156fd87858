"""A run of post-hoc pruning, from its options to its summary. `post_hoc` has the protocol."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gaugelasso.baselines.efficiency import EfficiencyRanking, balanced
from gaugelasso.baselines.post_hoc import PrunePlan, PruneRun
from gaugelasso.baselines.rival import RivalTrainer, check_length
from gaugelasso.baselines.source import Source, TrainedModel, settings_of
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.courses.window import Measured
from gaugelasso.compress.model_state import ModelState
from gaugelasso.config import Config
from gaugelasso.config.target import TargetConfig
from gaugelasso.errors import UserError
from gaugelasso.runs.folder import Existing
from gaugelasso.runs.units import amount
from gaugelasso.training.records import Progress
from gaugelasso.training.run_log import RunLog
from gaugelasso.training.state import RunState


def prune_settings(source: Source, plan: PrunePlan, changes: Mapping[str, str]) -> Config:
    """The config of a run that prunes; UserError if the target is wrong or cannot be reached."""
    config = pruning_config(source, plan, changes, "prune")
    _check_loss(source, plan)
    check_work(source, plan, config, _least_work)
    return config


def _least_work(state: ModelState, wanted: float) -> float:
    """The least work that the first ranking can reach, which rounds rank again."""
    with balanced(state):
        return EfficiencyRanking(state).least_work


def pruning_config(
    source: Source,
    plan: PrunePlan,
    changes: Mapping[str, str],
    what: str,
    without_effect: Collection[str] = (),
) -> Config:
    """The config of a run with the lengths and the target of a plan; `what` is the command.

    UserError for a change that is `without_effect` on it.
    """
    check_length(plan)
    target = TargetConfig(loss=plan.loss, fma=plan.fma or 0.0)
    config = settings_of(source.run, changes, target, what, without_effect)
    train = replace(config.train, steps=plan.steps, warmup=0, cooldown=plan.finetune, saturation=0)
    return replace(config, train=train)


def _check_loss(source: Source, plan: PrunePlan) -> None:
    if plan.loss is None:
        return
    loss = source.summary.get("selection_loss")
    if loss is None or not math.isfinite(loss):
        raise UserError(
            f"--loss {plan.loss:g}: the model of {str(source.run)!r} has no finite loss on "
            "selection data (selection_loss in its summary.json); train it again"
        )
    if loss > plan.loss:
        raise UserError(
            f"--loss {plan.loss:g}: the model of {str(source.run)!r} has a loss of {loss:.4g} on "
            "selection data before it is pruned; name a higher loss, or train it longer"
        )


def check_work(
    source: Source,
    plan: PrunePlan,
    config: Config,
    nearest: Callable[[ModelState, float], float],
) -> None:
    """UserError if the model has the plan's work already, or if `nearest` to it is above it."""
    if plan.fma is None:
        return
    state = Compressor(TrainedModel.of(source.run).build(), 0.0, config.compress).state
    counted = config.compress.accounting
    if plan.fma >= state.fma:
        raise UserError(
            f"--fma {plan.fma:g}: the model of {str(source.run)!r} has "
            f"{amount(state.fma, counted)} already; name less"
        )
    if (least := nearest(state, plan.fma)) > plan.fma:
        raise UserError(
            f"--fma {plan.fma:g} cannot be reached by pruning {str(source.run)!r}: the nearest is "
            f"{amount(least, counted)}"
        )


class PruneTrainer(RivalTrainer):
    """Prunes the model of `source`. Stops between rounds, and within the fine-tuning anywhere."""

    method = "post-hoc"
    command = "prune"

    def __init__(
        self,
        source: Source,
        plan: PrunePlan,
        config: Config,
        out: Path,
        existing: Existing = "refuse",
        on_progress: Callable[[Progress], None] | None = None,
    ):
        self.plan = plan
        super().__init__(source, plan, config, out, existing, on_progress)

    def method_driver(self, state: RunState) -> PruneRun:
        self.log = RunLog(state, self.evaluate, self.on_progress)
        self.pruning = self.new_run(state, lambda: self._measured(False))
        return self.pruning

    def new_run(self, state: RunState, measure: Callable[[], Measured]) -> PruneRun:
        return PruneRun(state, self.log, self.plan, measure)

    def outcome(self) -> dict[str, Any]:
        return {"pruning": {**self.plan.to_dict(), "rounds_made": self.pruning.rounds}}

    def missed_message(self, summary: Mapping[str, Any]) -> str:
        if self.plan.loss is not None:
            loss = summary["loss"]
            found = "no finite loss" if loss is None else f"a loss of {loss:.4g}"
            return (
                f"--loss {self.plan.loss:g} was missed: the pruned model has {found} on test data"
            )
        reached = amount(summary["fma_final"], self.config.compress.accounting)
        return f"--fma {self.plan.fma:g} was not reached: the nearest is {reached}"
