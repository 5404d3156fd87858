"""What the user gives to `compress`, and checks that need neither model nor text."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gaugelasso.cli.arguments import parse_changes
from gaugelasso.errors import UserError
from gaugelasso.export import FORMS, STOCK
from gaugelasso.export.extras import check_extra

NO_FORM = "none"
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
# What errors name in place of a key of the config.
_OPTIONS = {
    "task.path": "--data",
    "task.valid": "--valid",
    "task.length": "--length",
    "train.steps": "--steps",
    "train.batch": "--batch",
    "model.from": "MODEL",
}


@dataclass(frozen=True)
class Share:
    """A share of the original's loss, and how it was written."""

    value: float
    text: str


@dataclass(frozen=True)
class Wanted:
    """The arguments of the command that decide how it trains; None is chosen by `plan`."""

    data: str
    valid: str | None
    share: Share
    steps: int | None
    batch: int | None
    length: int | None
    changes: Mapping[str, str]

    @property
    def options(self) -> dict[str, str]:
        """The options of keys, but of those that --set names."""
        return {key: option for key, option in _OPTIONS.items() if key not in self.changes}

    @property
    def needs_tokenizer(self) -> bool:
        """Whether a text has to go through the tokenizer of the model."""
        valid = self.valid or self.changes.get("task.valid") or self.data
        text = not all(path.strip("'\"").endswith(".npy") for path in (self.data, valid))
        return text and "task.tokenizer" not in self.changes


def parse_share(text: str) -> Share:
    """The share that `3%` or `0.03` stands for.

    A number of 1 or more needs the sign: `3` is written for 3% more often than for 300%.
    """
    number = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*(%?)\s*", text, re.IGNORECASE)
    share = math.nan if number is None else float(number[1]) / (100 if number[2] else 1)
    if number is None or not math.isfinite(share):
        raise UserError(
            f"--above-original {text!r}: give a share of the original's loss, of 0 or more, as 3% "
            "or 0.03"
        )
    if not number[2] and share >= 1:
        raise UserError(
            f"--above-original {text!r} would be {share:.0%}; write {number[1]}% or {share:.0%}"
        )
    return Share(share, text.strip())


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


def check_form(form: str, causal: bool, changes: Mapping[str, str]) -> None:
    if form not in (*FORMS, NO_FORM):
        raise UserError(
            f"--form {form!r} is unknown; choose one of: {', '.join([*FORMS, NO_FORM])}"
        )
    # Now, and not when it has been imported or trained.
    if form == "hf" and not causal:
        raise UserError(
            f"--form {form} holds causal models, and the model is an encoder; choose --form onnx, "
            "pt2 or native"
        )
    if form in STOCK and changes.get("compress.shape", "").strip("'\"") != "llama":
        raise UserError(
            f"--form {form} holds models whose layers are alike; add --set compress.shape=llama, "
            "or choose another form"
        )
    check_extra(form)
