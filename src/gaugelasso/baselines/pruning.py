"""A run of post-hoc pruning, from its options to its summary. `post_hoc` has the protocol."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gaugelasso.baselines.efficiency import Ranking
from gaugelasso.baselines.post_hoc import PrunePlan, PruneRun
from gaugelasso.baselines.rival import RivalTrainer, check_length
from gaugelasso.baselines.source import Source, TrainedModel, settings_of
from gaugelasso.compress.compressor import Compressor
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
    check_length(plan)
    target = TargetConfig(loss=plan.loss, fma=plan.fma or 0.0)
    config = settings_of(source.run, changes, target, "prune")
    train = replace(config.train, steps=plan.steps, warmup=0, cooldown=plan.finetune, saturation=0)
    config = replace(config, train=train)
    _check_loss(source, plan)
    _check_work(source, plan, config)
    return config


def _check_loss(source: Source, plan: PrunePlan) -> None:
    loss = source.summary.get("selection_loss")
    if plan.loss is not None and (loss is None or loss > plan.loss):
        raise UserError(
            f"--loss {plan.loss:g}: the model of {str(source.run)!r} has a loss of {loss} on "
            "selection data before it is pruned; name a higher loss, or train it longer"
        )


def _check_work(source: Source, plan: PrunePlan, config: Config) -> None:
    if plan.fma is None:
        return
    state = Compressor(TrainedModel.of(source.run).build(), 0.0, config.compress).state
    counted = config.compress.accounting
    if plan.fma >= state.fma:
        raise UserError(
            f"--fma {plan.fma:g}: the model of {str(source.run)!r} has "
            f"{amount(state.fma, counted)} already; name less"
        )
    if (least := Ranking(state).least_work) > plan.fma:
        raise UserError(
            f"--fma {plan.fma:g} cannot be reached by pruning {str(source.run)!r}: the nearest is "
            f"{amount(least, counted)}"
        )


class PruneTrainer(RivalTrainer):
    """Prunes the model of `source`. Stops between rounds, and within the fine-tuning anywhere."""

    method = "post-hoc"
    plan_file = "prune.json"

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
        self.pruning = PruneRun(state, self.log, self.plan, lambda: self._measured(False))
        return self.pruning

    def outcome(self) -> dict[str, Any]:
        return {"pruning": {**self.plan.to_dict(), "rounds_made": self.pruning.rounds}}

    def missed_message(self, summary: Mapping[str, Any]) -> str:
        if self.plan.loss is not None:
            return (
                f"--loss {self.plan.loss:g} was missed: the pruned model has a loss of "
                f"{summary['loss']} on test data"
            )
        reached = amount(summary["fma_final"], self.config.compress.accounting)
        return f"--fma {self.plan.fma:g} was not reached: the nearest is {reached}"
