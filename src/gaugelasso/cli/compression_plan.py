"""What `compress` trains with: sections of a config that follow from a model and a text.

They hold only what this command chooses. All else follows from them as in any config.
"""

import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gaugelasso.cli.compression_options import Wanted
from gaugelasso.compress import accountings
from gaugelasso.config import Config, changed_config
from gaugelasso.config.base import BaseModel
from gaugelasso.config.imported import task_of
from gaugelasso.errors import UserError, first_line
from gaugelasso.plugins import NamedBy
from gaugelasso.report.toml import comment, to_toml
from gaugelasso.runs.checkpoint import load_spec
from gaugelasso.runs.writing import write_text
from gaugelasso.tasks import SELECTION, TRAINING, TokenText
from gaugelasso.tasks.stored import cache_folder
from gaugelasso.tasks.text import load_parts
from gaugelasso.tasks.windows import check_long_enough
from gaugelasso.training.resume import FREE

# Tokens of a window, and windows of a step, unless given.
_LENGTH, _BATCH = 512, 16
# Share of the text that is held out where no other text is given.
_HELD_OUT = 0.05
# Steps for one pass over the text, within these bounds: fewer cut little, and many passes overfit.
_LEAST_STEPS, _MOST_STEPS = 1_000, 4_000
# Batches of an evaluation during the run and at its end, at most.
_EVALUATED, _EVALUATED_LAST = 8, 64
# Stands for the vocabulary of an encoder before it is read: a mask token of --set is below it.
_ANY_VOCABULARY = 2**18
# Evaluations during the run, each of which updates the price in the progress line.
_EVALUATIONS = 40


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
    if (wanted.length or 0) > spec.length:
        raise UserError(
            f"--length {wanted.length}: the model has {spec.length} positions; give at most "
            f"{spec.length}"
        )
    length = wanted.length or min(_LENGTH, spec.length)
    sections = _sections(wanted, base, task_of(spec.causal), length)
    # Adds the changes to the sections.
    config = changed_config(sections, wanted.changes, NamedBy(Path.cwd()))
    found = Plan(sections, config)
    _choose_rest_(sections["train"], found)
    return Plan(sections, Config.from_dict(sections))


def _sections(wanted: Wanted, base: Path, name: str, length: int) -> dict[str, dict[str, Any]]:
    """What is given and what does not depend on the text; the changes are not made yet."""
    task = {"name": name, "path": wanted.data, "length": length}
    if wanted.valid is not None:
        task["valid"] = wanted.valid
    elif "task.valid" not in wanted.changes:
        task["split"] = _HELD_OUT
    train = {"steps": wanted.steps, "batch": wanted.batch or _BATCH}
    return {
        "task": task,
        "model": {"from": str(base)},
        "target": {},
        "train": {key: value for key, value in train.items() if value is not None},
    }


def check_before_import(wanted: Wanted, base: Path, causal: bool, device: str) -> None:
    """UserError if options or texts are wrong, as far as they can be checked without the model."""
    sections = _sections(wanted, base, task_of(causal), wanted.length or 1)
    # In place of what follows from the model; with a fingerprint, its folder is not read.
    sections["model"]["sha256"] = "unread"
    vocabulary = 1 if causal else _ANY_VOCABULARY
    sections["task"] |= {"tokenizer": "unread", "vocabulary": vocabulary}
    sections["compress"] = {"lr": 1e-3}
    config = changed_config(sections, wanted.changes, NamedBy(Path.cwd()))
    task, options = config.task, config.compress
    accountings.chosen(options, accountings.latency(options, torch.device(device)))
    assert isinstance(task, TokenText)
    if any(path.endswith(".npy") for path in (task.path, task.valid)):
        return
    parts = load_parts(task.path, task.valid, task.split, cache_folder(task.cache))
    for key, origin, part in zip(("path", "valid"), (task.path, task.valid), parts, strict=True):
        if origin and not len(part):
            raise UserError(f"task.{key} = {origin!r}: the text is empty")
    if wanted.length is not None:
        # Special tokens at both ends of a window are none of the text.
        window = max(1, wanted.length - 2)
        unit = "bytes, and so not more tokens"
        origins = task.path, task.valid or task.path
        check_long_enough(*parts, wanted.length, unit, origins, split=task.split, window=window)


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
    """Write config.toml; `target` says where the target loss comes from."""
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
