"""Runs of a plan without processes of their own."""

import contextlib

from rich.console import Console

from gaugelasso.cli import app
from gaugelasso.compress.result import TargetMissed
from gaugelasso.sweeps.arms import ArmOutcome
from gaugelasso.sweeps.sweep import Plan


def train_here(plan: Plan, console: Console) -> list[ArmOutcome]:
    """Train the runs of a plan by their commands, one after the other in this process."""
    plan.prepare(None)
    for arm in plan.arms:
        for seed in plan.seeds:
            # A run that misses its target has a summary all the same.
            with contextlib.suppress(TargetMissed):
                app([*plan.words(arm, seed)[3:], "--resume"], standalone_mode=False)
    return [ArmOutcome(arm, list(plan.seeds)) for arm in plan.arms]
