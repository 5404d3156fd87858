"""Runs of a plan without processes of their own."""

from rich.console import Console

from gaugelasso.cli import app
from gaugelasso.sweeps.arms import ArmOutcome
from gaugelasso.sweeps.sweep import Plan


def train_here(plan: Plan, console: Console) -> list[ArmOutcome]:
    """Train the runs of a plan by their commands, one after the other in this process."""
    plan.prepare(None)
    for arm in plan.arms:
        for seed in plan.seeds:
            app([*plan.words(arm, seed)[3:], "--resume"], standalone_mode=False)
    return [ArmOutcome(arm, list(plan.seeds)) for arm in plan.arms]
