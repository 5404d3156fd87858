"""The settings of a baseline: the run's own steps, data and schedule, without pressure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gaugelasso.baselines.source import known_schedule, no_effect
from gaugelasso.config import Config, run_config
from gaugelasso.config.base import BaseModel
from gaugelasso.config.model import ModelConfig
from gaugelasso.config.plain import EVENT_KEYS, PLAIN_KEYS, PRESSURE_KEYS, plain
from gaugelasso.errors import UserError
from gaugelasso.models import same_network
from gaugelasso.runs.checkpoint import load_spec
from gaugelasso.runs.units import counts_work


@dataclass(frozen=True)
class Bar:
    """The loss to reach: that of the run on selection data, and a tolerance above it."""

    loss: float
    tolerance: float = 0.0

    @property
    def limit(self) -> float:
        return self.loss + self.tolerance * abs(self.loss)

    def reached_by(self, loss: float | None) -> bool:
        """Whether a loss on selection data, None if it was not finite, is within the limit."""
        return loss is not None and loss <= self.limit


def loss_of(run: Path, summary: Mapping[str, Any], what: str = "a baseline") -> float:
    """Return the loss that `what` must reach; UserError if the run has none, or no right to it.

    It is the loss on selection data: test data decide nothing.
    """
    loss = summary.get("selection_loss")
    if not summary.get("held", False):
        told = _figures(summary)
        raise UserError(
            f"{str(run)!r} missed its target{': ' if told else ''}{told}; {what} needs a run that "
            "held its target, so train it again with more steps, or with a target that is easier"
        )
    if not isinstance(loss, int | float) or not math.isfinite(loss):
        raise UserError(
            f"{str(run / 'summary.json')!r}: no selection_loss, which decides what {what} must "
            "reach; runs of version 0.1.0 lack it, train the run again"
        )
    return float(loss)


def _figures(summary: Mapping[str, Any]) -> str:
    """What a run ended with, beside each target that it names; empty if it names none."""
    ends = (("loss", "loss", "loss"), ("metric", "metric", "selection_metric"),
            ("fma", "work", "fma_final"))  # fmt: skip
    told = []
    for key, what, reached in ends:
        if (target := summary.get(f"{key}_target")) is not None:
            end = summary.get(reached)
            shown = "not finite" if end is None else f"{end:g}"
            told.append(f"its {what} is {shown} and target.{key} is {target:g}")
    return ", ".join(told)


def uniform_settings(run: Path, summary: Mapping[str, Any], changes: Mapping[str, str]) -> Config:
    """Return the config of the uniform models of a baseline: that of `plain_settings`.

    UserError unless the run began with a uniform transformer. A work target other than FMA is
    replaced: a ladder is one of work, and a profile has no times of other numbers of heads.
    """
    config, initial = run_config(run), run / "initial.json"
    if isinstance(config.model, BaseModel):
        raise UserError(
            f"{str(run)!r} began with the weights of model.from = {config.model.base.name!r}; a "
            "baseline trains narrower models from scratch, which is no comparison with it"
        )
    if not isinstance(config.model, ModelConfig):
        raise UserError(
            f"{str(run)!r} is a run of a model of its own, and how to narrow that is not known; a "
            "baseline needs a run of the built-in transformer"
        )
    if not same_network(load_spec(initial), config.model.spec(config.task)):
        raise UserError(
            f"{str(initial)!r}: the run did not begin with the uniform model of its config "
            "(--structure); a baseline narrows that model, so give a run that did"
        )
    settings = plain_settings(run, summary, changes, "a baseline", ("task", "target"))
    if counts_work(settings.compress.accounting):
        return settings
    compress = replace(settings.compress, accounting="fma", profile="")
    return replace(settings, compress=compress)


def plain_settings(
    run: Path,
    summary: Mapping[str, Any],
    changes: Mapping[str, str],
    what: str,
    taken: Sequence[str],
) -> Config:
    """Return the config of plain training as the run was: no pressure, and its schedule.

    A rival's steps are those of the full model too, with its warm-up. The anneal is the rival's.
    `changes` are made too; UserError if they change what `what` takes from its run, which has the
    sections `taken` as a whole, or if plain training makes no use of them.
    """
    frozen = summary.get("frozen_step")
    # A met work target, or a second anneal, moved the start of the cooldown.
    cooldown = run_config(run).train.cooldown if frozen is None else summary["steps"] - frozen
    for key, value in changes.items():
        if key == "train.seed":
            raise UserError(f"--set {key}={value}: leave it out; seeds are given by --seeds")
        if key in PLAIN_KEYS or key.partition(".")[0] in taken:
            others = "other keys of [compress] and [train] can be set"
            free = others if "model" in taken else f"the keys of [model] and {others}"
            raise UserError(f"--set {key}={value}: {what} takes {key} from its run; {free}")
        if key in (*PRESSURE_KEYS, *EVENT_KEYS):
            raise no_effect(key, value, what)
    whole, config = known_schedule(run, summary), run_config(run, changes)
    # `plain` sets the anneal, as much of it as fits.
    train = replace(config.train, warmup=whole["warmup"], steps=whole["steps"], cooldown=0)
    return plain(replace(config, train=train), whole["steps"], cooldown)
