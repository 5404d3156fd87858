"""What `compress` trains with: sections of a config that follow from a model and a text.

They hold only what this command chooses. All else follows from them as in any config.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gaugelasso.cli.arguments import parse_changes
from gaugelasso.config import Config, changed_config
from gaugelasso.config.base import BaseModel
from gaugelasso.config.imported import task_of
from gaugelasso.errors import UserError, first_line
from gaugelasso.plugins import NamedBy
from gaugelasso.report.toml import comment, to_toml
from gaugelasso.runs.checkpoint import load_spec
from gaugelasso.runs.writing import write_text
from gaugelasso.tasks import SELECTION, TRAINING, TokenText
from gaugelasso.training.resume import FREE

# Tokens of a window, and windows of a step, unless given.
_LENGTH, _BATCH = 512, 16
# Share of the text that is held out where no other text is given.
_HELD_OUT = 0.05
# Steps for one pass over the text, within these bounds: fewer cut little, and many passes overfit.
_LEAST_STEPS, _MOST_STEPS = 1_000, 4_000
# Batches of an evaluation during the run and at its end, at most.
_EVALUATED, _EVALUATED_LAST = 8, 64
# Evaluations during the run, each of which updates the price in the progress line.
_EVALUATIONS = 40
# Keys that arguments of the command decide.
_DECIDED = {
    "task.name": "the task follows from the model",
    "task.module": "the task follows from the model",
    "task.path": "give the text with --data",
    "model.from": "give the model as MODEL",
    **dict.fromkeys(
        [f"target.{key}" for key in ("loss", "metric", "fma", "above_full")],
        "give the target with --above-original",
    ),
}


@dataclass(frozen=True)
class Wanted:
    """The arguments of the command that decide how it trains; None is chosen here."""

    data: str
    valid: str | None
    share: float
    steps: int | None
    batch: int | None
    length: int | None
    changes: Mapping[str, str]


def parse_share(text: str) -> float:
    """The share that `3%` or `0.03` stands for."""
    number = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*(%?)\s*", text, re.IGNORECASE)
    share = math.nan if number is None else float(number[1]) / (100 if number[2] else 1)
    if not math.isfinite(share):
        raise UserError(
            f"--above-original {text!r}: give a share of the original's loss, of 0 or more, as 3% "
            "or 0.03"
        )
    return share


def parse_wanted_changes(changes: list[str] | None, device: str | None) -> dict[str, str]:
    """The values of --set by key; UserError for a key that arguments of the command decide."""
    found = parse_changes(changes, device)
    for key in found:
        if key in _DECIDED:
            raise UserError(
                f"--set {key}={found[key]}: {_DECIDED[key]}; for another target or task write a "
                "config, and train it with gaugelasso train"
            )
    return found


@dataclass(frozen=True)
class Plan:
    """The sections as config.toml has them, and the config that they make.

    The target is missing until `with_target` names it.
    """

    sections: dict[str, dict[str, Any]]
    config: Config

    @property
    def task(self) -> TokenText:
        assert isinstance(self.config.task, TokenText)
        return self.config.task

    @property
    def tokens_per_step(self) -> int:
        train = self.config.train
        return train.batch * train.accumulate * self.task.length

    @property
    def contexts(self) -> tuple[int, int]:
        """The most tokens of a sequence: of the original, and of the result."""
        model = self.config.model
        assert isinstance(model, BaseModel)
        return model.base.spec.length, model.context

    def with_target(self, loss: float) -> "Plan":
        sections = {**self.sections, "target": {**self.sections.get("target", {}), "loss": loss}}
        # No other section follows from the loss. To build the config anew would read all weights.
        target = replace(self.config.target, loss=loss)
        return Plan(sections, replace(self.config, target=target))

    def describe(self) -> str:
        """Steps, tokens of a step, and passes over the text."""
        train, text = self.config.train, len(self.task.part(TRAINING))
        passes = train.steps * self.tokens_per_step / text
        return (
            f"{train.steps:,} steps of {self.tokens_per_step:,} tokens in windows of "
            f"{self.task.length:,}, {passes:.3g} passes over {text:,} tokens"
        )

    def describe_context(self) -> str | None:
        """How the context gets shorter, and how to keep it; None if it stays."""
        before, after = self.contexts
        if before == after:
            return None
        return f"{before:,} -> {after:,} tokens; keep it with --set model.context={before}"


def plan(base: Path, wanted: Wanted) -> Plan:
    """Choose what is not given; UserError if the text is too short, or the model does not fit."""
    spec = load_spec(base)
    length = wanted.length or min(_LENGTH, spec.length)
    task = {"name": task_of(spec), "path": wanted.data, "length": length}
    if wanted.valid is not None:
        task["valid"] = wanted.valid
    elif "task.valid" not in wanted.changes:
        task["split"] = _HELD_OUT
    train = {"steps": wanted.steps, "batch": wanted.batch or _BATCH}
    sections: dict[str, dict[str, Any]] = {
        "task": task,
        "model": {"from": str(base)},
        "target": {},
        "train": {key: value for key, value in train.items() if value is not None},
    }
    # Adds the changes to the sections.
    config = changed_config(sections, wanted.changes, NamedBy(Path.cwd()))
    found = Plan(sections, config)
    _choose_rest_(sections["train"], found)
    return Plan(sections, Config.from_dict(sections))


def _choose_rest_(train: dict[str, Any], found: Plan) -> None:
    task, batch = found.task, found.config.train.batch
    one_pass = len(task.part(TRAINING)) // found.tokens_per_step
    steps = train.setdefault("steps", min(max(one_pass, _LEAST_STEPS), _MOST_STEPS))
    train.setdefault("eval_every", max(1, steps // _EVALUATIONS))
    # Held-out batches start again after the last window: more would measure the same again.
    batches = math.ceil(task.whole_windows(SELECTION) / batch)
    train.setdefault("eval_batches", min(batches, _EVALUATED))
    train.setdefault("final_batches", min(batches, _EVALUATED_LAST))


def write_plan(path: Path, chosen: Plan, target: str) -> None:
    """Write config.toml; `target` says where the named loss comes from."""
    title = comment("chosen by gaugelasso compress; gaugelasso train takes this file")
    write_text(path, f"{title}\n\n" + to_toml(chosen.sections, {"target.loss": target}))


def check_same_plan(path: Path, chosen: Plan) -> None:
    """UserError unless config.toml holds these sections."""
    try:
        before = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r}: not a readable config ({first_line(error)})") from None
    for section in chosen.sections.keys() | before.keys():
        old, new = before.get(section, {}), chosen.sections.get(section, {})
        if not isinstance(old, dict):
            raise UserError(f"{str(path)!r}: [{section}] must be a section of key = value lines")
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key) and (section, key) not in FREE:
                raise UserError(
                    f"--resume: {section}.{key} is {new.get(key)!r} now, and {old.get(key)!r} in "
                    f"{str(path)!r}; give the same options again, choose another --out, or train "
                    "an edited config with gaugelasso train"
                )
