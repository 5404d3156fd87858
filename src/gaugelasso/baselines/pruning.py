"""A run of post-hoc pruning, from its options to its summary. `post_hoc` has the protocol."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gaugelasso.baselines.efficiency import Ranking
from gaugelasso.baselines.post_hoc import PrunePlan, PruneRun
from gaugelasso.baselines.source import Source, TrainedModel, settings_of
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.courses.stages import LEAST_STEPS
from gaugelasso.compress.result import TargetMissed
from gaugelasso.config import Config
from gaugelasso.config.target import TargetConfig
from gaugelasso.errors import UserError
from gaugelasso.runs.folder import Existing
from gaugelasso.runs.reading import exists, read_json
from gaugelasso.runs.units import amount
from gaugelasso.signals import StopRequest
from gaugelasso.training.evaluation import HeldOut
from gaugelasso.training.records import Progress
from gaugelasso.training.run_driver import RunDriver
from gaugelasso.training.run_log import RunLog
from gaugelasso.training.state import RunState
from gaugelasso.training.trainer import Trainer

# The plan of a run, beside its config.
PLAN = "prune.json"


def prune_settings(source: Source, plan: PrunePlan, changes: Mapping[str, str]) -> Config:
    """The config of a run that prunes; UserError if the target is wrong or cannot be reached."""
    if plan.steps < LEAST_STEPS:
        raise UserError(
            f"--finetune {plan.finetune}: with the rounds that makes {plan.steps} steps, and a run "
            f"needs at least {LEAST_STEPS}; raise it"
        )
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


class PruneTrainer(Trainer):
    """Prunes the model of `source`. Stops between rounds, and within the fine-tuning anywhere."""

    def __init__(
        self,
        source: Source,
        plan: PrunePlan,
        config: Config,
        out: Path,
        existing: Existing = "refuse",
        on_progress: Callable[[Progress], None] | None = None,
    ):
        self.source, self.plan = source, plan
        if existing == "resume" and exists(out / PLAN):
            _check_same_plan(out / PLAN, self._plan())
        super().__init__(config, out, existing, on_progress, structure=TrainedModel.of(source.run))
        if not self.compressor.steps:
            self.folder.write(PLAN, self._plan())
            self.record.training_fma, self.record.wall_s = source.training_fma, source.wall_s

    def _plan(self) -> dict[str, Any]:
        return {"run": str(self.source.run), **self.plan.to_dict()}

    def _new_driver(self, state: RunState) -> RunDriver:
        self.log = RunLog(state, self.evaluate, self.on_progress)
        self._driver = PruneRun(state, self.log, self.plan, lambda: self._measured(False))
        return self._driver

    def _is_stopping(self, request: StopRequest) -> bool:
        return request.asked and self._driver.settled

    def _summary(self, selection: HeldOut) -> dict[str, Any]:
        found = super()._summary(selection)
        return found | {
            "method": "post-hoc",
            "source": self.source.to_dict(),
            "pruning": {**self.plan.to_dict(), "rounds_made": self._driver.rounds},
        }

    def _finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        super()._finish(summary)
        if not summary["held"]:
            raise TargetMissed(self._missed_message(summary))
        return summary

    def _missed_message(self, summary: Mapping[str, Any]) -> str:
        where = f"the model is in {str(self.folder.checkpoints)!r}"
        if self.plan.loss is not None:
            return (
                f"--loss {self.plan.loss:g} was missed: the pruned model has a loss of "
                f"{summary['loss']} on test data; {where}"
            )
        reached = amount(summary["fma_final"], self.config.compress.accounting)
        return f"--fma {self.plan.fma:g} was not reached: the nearest is {reached}; {where}"


def _check_same_plan(path: Path, plan: Mapping[str, Any]) -> None:
    before = read_json(path)
    for key, value in plan.items():
        if not isinstance(before, dict) or before.get(key) != value:
            old = before.get(key) if isinstance(before, dict) else None
            raise UserError(
                f"--resume: {key} = {value!r}, but the pruning in {str(path.parent)!r} began with "
                f"{old!r}; give the same, or choose another --out"
            )
