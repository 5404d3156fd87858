"""The seeds and arms of a sweep, and the outcome of each arm."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gaugelasso.errors import UserError

# A name is used for a folder, a row of a table and a line of a legend.
_LONGEST_NAME = 60
# The longest range; without a limit, a typing error could fill the memory.
_MOST_SEEDS = 10_000


def parse_seeds(text: str) -> list[int]:
    """Parse '42-46', '1,5,9' or a mix of both; UserError names what is wrong."""
    seeds: dict[int, None] = {}
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        try:
            first, last = int(low), int(high) if dash else int(low)
        except ValueError:
            raise UserError(f"--seeds {text!r}: give numbers as in 42-46 or 1,5,9") from None
        if last < first:
            raise UserError(f"--seeds {text!r}: the range {part!r} ends before it starts")
        if last - first >= _MOST_SEEDS:
            raise UserError(f"--seeds {text!r}: {part!r} is more than {_MOST_SEEDS:,} seeds")
        seeds |= dict.fromkeys(range(first, last + 1))
    return list(seeds)


@dataclass(frozen=True)
class Arm:
    """One condition: the settings that its runs change, and the folder of its runs.

    `options` are further options of the command `train`. A sweep without a comparison has one arm,
    whose name is empty.
    """

    name: str
    changes: tuple[str, ...]
    folder: Path
    options: tuple[str, ...] = ()

    def run_folder(self, seed: int) -> Path:
        return self.folder / f"seed{seed}"

    def label(self, seed: int) -> str:
        """Return the name of one run in messages."""
        return f"{self.name}, seed {seed}" if self.name else f"seed {seed}"


def parse_arms(texts: Sequence[str], out: Path) -> list[Arm]:
    """Parse 'NAME: KEY=VALUE KEY=VALUE', each with a folder under `out`; UserError if it is wrong.

    Does not check the keys and values: loading the config does.
    """
    if not texts:
        return [Arm("", (), out)]
    arms: dict[str, Arm] = {}
    for text in texts:
        before, colon, after = text.partition(":")
        if not colon:
            raise UserError(
                f"--arm {text!r}: write it as 'NAME: KEY=VALUE ...', "
                "e.g. 'wide trust: compress.trust=4', or 'NAME:' for no change"
            )
        name, changes = " ".join(before.split()), tuple(after.split())
        folder = "-".join(re.findall(r"\w+", name.casefold()))
        if not folder:
            raise UserError(f"--arm {text!r}: give it a name of letters or digits before the colon")
        if len(name) > _LONGEST_NAME:
            raise UserError(
                f"--arm {text!r}: a name has at most {_LONGEST_NAME} characters, not {len(name)}"
            )
        for change in changes:
            if "=" not in change:
                raise UserError(f"--arm {text!r}: write {change!r} as key=value, without spaces")
            if change.startswith("train.seed="):
                raise UserError(f"--arm {text!r}: leave out {change}; seeds are given by --seeds")
        if (twin := arms.get(folder)) is not None:
            raise UserError(
                f"--arm {text!r}: the folder {folder!r} is taken by the arm {twin.name!r}; "
                "choose another name"
            )
        arms[folder] = Arm(name, changes, out / folder)
    return list(arms.values())


@dataclass(frozen=True)
class ArmOutcome:
    """The seeds of an arm whose runs ended, and those whose runs failed.

    A run that missed its target is in both lists: it failed, but its figures count.
    """

    arm: Arm
    ended: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    @property
    def folders(self) -> list[Path]:
        return [self.arm.run_folder(seed) for seed in sorted(self.ended)]


def failures_message(outcomes: Sequence[ArmOutcome], seeds: int) -> str:
    """Name in one line the runs that failed and the arms without results; "" if no run failed."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    if not failed:
        return ""
    parts = []
    for outcome in failed:
        numbers = f"seeds {', '.join(map(str, sorted(outcome.failed)))}"
        parts.append(f"{outcome.arm.name}, {numbers}" if outcome.arm.name else numbers)
    runs = sum(len(outcome.failed) for outcome in failed)
    text = f"{runs} of {seeds * len(outcomes)} runs failed: {'; '.join(parts)}"
    lost = [outcome.arm.name for outcome in failed if outcome.arm.name and not outcome.ended]
    return text + (f"; not in the results: {', '.join(lost)}" if lost else "")
