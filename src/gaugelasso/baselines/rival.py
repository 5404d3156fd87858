"""The trainer of a method that begins with the model of a finished run, and has a plan of its own.

The plan is in a file beside the run's config, and a resumed run must have the same. So must its
source have the same model, in whatever folder it is by then.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from gaugelasso.axes import Compressible
from gaugelasso.baselines.plain_driver import PlainDriver
from gaugelasso.baselines.source import Source, TrainedModel
from gaugelasso.compress.courses.stages import LEAST_STEPS
from gaugelasso.compress.result import TargetMissed
from gaugelasso.config import Config
from gaugelasso.distributed import Team
from gaugelasso.errors import UserError
from gaugelasso.runs.folder import Existing
from gaugelasso.runs.plans import PLANS
from gaugelasso.runs.reading import exists, read_json
from gaugelasso.runs.training_work import BEGUN, total_training, training_work
from gaugelasso.signals import StopRequest
from gaugelasso.training.evaluation import HeldOut
from gaugelasso.training.records import Progress
from gaugelasso.training.run_driver import RunDriver
from gaugelasso.training.state import RunState
from gaugelasso.training.step import TrainingStep
from gaugelasso.training.trainer import Trainer

# Options that the plans of early versions lack, as they were.
_EARLY = {"mask_bound": 0.0, "layer_distill": 0.0}
# The key of a plan's file for the model that the method began with. `run` only says where it was.
_FINGERPRINT = "run_sha256"


class Plan(Protocol):
    """The options of a method."""

    @property
    def finetune(self) -> int: ...

    @property
    def steps(self) -> int: ...

    def to_dict(self) -> dict[str, Any]: ...


class RivalTrainer(Trainer):
    """`source` is the run that the method begins with; its training is part of the method's.

    A subclass names the method and its command, and gives the driver.
    """

    method: str

    def __init__(
        self,
        source: Source,
        plan: Plan,
        config: Config,
        out: Path,
        existing: Existing = "refuse",
        on_progress: Callable[[Progress], None] | None = None,
    ):
        self.source = source
        options = plan.to_dict()
        self.first_batch = source.batches
        plan_file = PLANS[self.command]
        if existing == "resume" and exists(out / plan_file):
            before = _same_plan(out / plan_file, source, options)
            # Runs of early versions began with the first batch of the full model.
            self.first_batch = before.get("batches", 0)
        structure = TrainedModel.of(source.run)
        super().__init__(config, out, existing, on_progress, structure=structure)
        if not self.compressor.steps:
            begun = {"run": str(source.run), _FINGERPRINT: source.fingerprint}
            self.folder.write(plan_file, {**begun, **options, "batches": self.first_batch})
            self.record.training_fma, self.record.wall_s = source.training_fma, source.wall_s

    def method_driver(self, state: RunState) -> PlainDriver:
        """The driver of a run of this method; sets `log` too."""
        raise NotImplementedError

    def outcome(self) -> dict[str, Any]:
        """The keys of the summary that only this method has."""
        raise NotImplementedError

    def missed_message(self, summary: Mapping[str, Any]) -> str:
        """What was named, and the nearest that was reached."""
        raise NotImplementedError

    def _new_driver(self, state: RunState) -> RunDriver:
        self._settled = self.method_driver(state)
        return self._settled

    def _new_step(
        self, model: Compressible, config: Config, device: str, team: Team
    ) -> TrainingStep:
        return TrainingStep(model, config, device, team, self.first_batch)

    def _is_stopping(self, request: StopRequest) -> bool:
        return request.asked and self._settled.settled

    def _summary(self, selection: HeldOut) -> dict[str, Any]:
        found = super()._summary(selection)
        source = {**self.source.to_dict(), "batches": self.first_batch}
        own = self.record.training_fma - self.source.training_fma
        work = training_work(own, total_training(self.source.summary), BEGUN)
        return {**found, "method": self.method, "source": source, **work, **self.outcome()}

    def _finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        super()._finish(summary)
        if not summary["held"]:
            message = self.missed_message(summary)
            raise TargetMissed(f"{message}; the model is in {str(self.folder.checkpoints)!r}")
        return summary


def check_length(plan: Plan) -> None:
    """UserError if the phases of a plan are too short for a run."""
    if plan.steps < LEAST_STEPS:
        raise UserError(
            f"--finetune {plan.finetune}: with the phases before it that makes {plan.steps} steps, "
            f"and a run needs at least {LEAST_STEPS}; raise it"
        )


def _same_plan(path: Path, source: Source, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of a plan's file; UserError unless it is of this source and has these options."""
    before = read_json(path)
    if not isinstance(before, dict):
        raise UserError(f"{str(path)!r}: not the plan of a run; start another with --out")
    _check_source(path, source, before)
    for key, value in options.items():
        old = before.get(key, _EARLY.get(key))
        if old != value:
            raise UserError(
                f"--resume: {key} = {value!r}, but the run in {str(path.parent)!r} began with "
                f"{old!r}; give the same, or choose another --out"
            )
    return before


def _check_source(path: Path, source: Source, before: Mapping[str, Any]) -> None:
    """UserError unless the source has the model that the run of this plan began with."""
    was = before.get("run")
    if _FINGERPRINT in before:
        same = before[_FINGERPRINT] == source.fingerprint
    else:  # plans of early versions: the path is all that they have
        same = os.path.realpath(str(was)) == os.path.realpath(source.run)
    if not same:
        raise UserError(
            f"--resume: the model in {str(source.run)!r} is not the one that the run in "
            f"{str(path.parent)!r} began with, which was in {was!r}; give the run with that model, "
            "or choose another --out"
        )
