"""A run of CoFi, from its options to its summary. `cofi` has the phases."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gaugelasso.axes import Compressible
from gaugelasso.baselines.cofi import CofiLog, CofiPlan, CofiRun, cost_terms, reached
from gaugelasso.baselines.cofi_masks import Masks
from gaugelasso.baselines.cofi_step import CofiDistillation, CofiStep
from gaugelasso.baselines.rival import RivalTrainer, check_length
from gaugelasso.baselines.source import Source, settings_of, transformer_of
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.courses.window import Measured
from gaugelasso.config import Config
from gaugelasso.config.plain import EVENT_KEYS
from gaugelasso.config.target import TargetConfig
from gaugelasso.distributed import Team
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from gaugelasso.runs.folder import Existing
from gaugelasso.runs.targets import ANY_LOSS
from gaugelasso.runs.units import counts_work
from gaugelasso.training.evaluation import HeldOut
from gaugelasso.training.records import Progress
from gaugelasso.training.state import RunState


def teacher_of(run: Path) -> Transformer:
    """The model of a run; UserError unless it is a built-in transformer that the masks fit."""
    model = transformer_of(run, "CoFi has masks for")
    spec = model.initial_spec
    # A closed mask zeroes a map. A bias after it would still be written.
    reason = ""
    if spec.post_norm:  # which is a mean over all sites, masked or not
        reason = "post_norm = true"
    elif spec.write_bias or spec.mlp != "swiglu":
        reason = "write_bias = true" if spec.write_bias else f"mlp = {spec.mlp!r}"
    if reason:
        raise UserError(
            f"the model of {str(run)!r} has {reason}; CoFi has masks for operators that normalise "
            "what they read, without output biases, and for MLPs of the kind 'swiglu' only"
        )
    return model


def cofi_settings(source: Source, plan: CofiPlan, changes: Mapping[str, str]) -> Config:
    """The config of a run of CoFi; UserError if no masks of the full model have the target."""
    check_length(plan)
    work = plan.objective == "fma"
    # No key of a config names a number of parameters.
    without = TargetConfig(loss=ANY_LOSS, hold="pressed")
    target = TargetConfig(fma=plan.target) if work else without
    config = settings_of(source.run, changes, target, "cofi", (*EVENT_KEYS, "train.distill"))
    accounting = config.compress.accounting
    if work and not counts_work(accounting):
        raise UserError(
            f"--fma: compress.accounting = {accounting!r} of {str(source.run)!r} counts no work; "
            "--set compress.accounting=fma, or give --parameters"
        )
    _check_target(source, plan, config)
    # No events, so nothing to probe for; and --distill is its share of the distillation.
    train = replace(
        config.train, steps=plan.steps, warmup=plan.warmup, cooldown=plan.finetune, saturation=0,
        probe=False, distill=0.0,
    )  # fmt: skip
    return replace(config, train=train)


def _check_target(source: Source, plan: CofiPlan, config: Config) -> None:
    model = teacher_of(source.run)
    state = Compressor(model, 0.0, config.compress).state
    masks = Masks(
        model, cost_terms(state, plan.objective), plan.mask_rate, 0, plan.mask_bound or math.inf
    )
    if not 0 < plan.target < masks.full:
        raise UserError(
            f"{plan.given}: must be above 0 and below the {masks.full:,.0f} of the model of "
            f"{str(source.run)!r}"
        )
    if plan.target < (least := masks.least):
        raise UserError(
            f"{plan.given} cannot be reached by masks of {str(source.run)!r}: the nearest is "
            f"{least:,.0f}, of residual sites without blocks: {masks.fewest} of {len(model.sites)}"
        )


class CofiTrainer(RivalTrainer):
    """Trains a student under masks; the model of `source` is its start and its teacher."""

    method = "cofi"
    command = "cofi"

    def __init__(
        self,
        source: Source,
        plan: CofiPlan,
        config: Config,
        out: Path,
        existing: Existing = "refuse",
        on_progress: Callable[[Progress], None] | None = None,
    ):
        self.plan, self._teacher = plan, teacher_of(source.run).eval().requires_grad_(False)
        super().__init__(source, plan, config, out, existing, on_progress)

    def _new_step(self, model: Compressible, config: Config, device: str, team: Team) -> CofiStep:
        logits = self._teacher.initial_spec.input_kind == "tokens"
        teacher = self._teacher.to(device)
        taught = CofiDistillation(teacher, self.plan.distill, logits, self.plan.layer_distill)
        return CofiStep(model, config, device, team, self.first_batch, taught)

    def method_driver(self, state: RunState) -> CofiRun:
        self.log = log = CofiLog(state, self.evaluate, self.on_progress)
        self.cofi = CofiRun(state, log, self.plan)
        return self.cofi

    def evaluate(self, batches: int) -> Measured:
        masks, model = self.cofi.masks, self.model
        assert isinstance(model, Transformer)
        with contextlib.nullcontext() if masks is None else masks.applied(model):
            return super().evaluate(batches)

    def _reached(self) -> float:
        return reached(self.compressor.state, self.plan.objective)

    def _summary(self, selection: HeldOut) -> dict[str, Any]:
        return {**super()._summary(selection), "held": self.plan.is_met(self._reached())}

    def outcome(self) -> dict[str, Any]:
        found = {"reached": self._reached(), **self.cofi.controller()}
        return {"cofi": {**self.plan.to_dict(), **found}}

    def missed_message(self, summary: Mapping[str, Any]) -> str:
        found = summary["cofi"]
        return (
            f"{self.plan.given} was not reached: the nearest is {found['reached']:,.0f}; lambda_1 "
            f"was {found['lambda_1']:.3g} at the end of pruning; {self.plan.advice}"
        )
