"""Whole operators: one goes at once where the batch can do without it for what it costs.

An operator takes some milliseconds at any width. Pressure makes it narrow, and never has it leave
while a few of its channels matter a little. So the loss without each operator is measured, and the
one goes that costs the batch least for what it saves.
"""

import math
from functools import partial

import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.compress.drop import NOTHING, Decision, channel_rms, close_and_round
from gaugelasso.compress.events import EventRules, consult_
from gaugelasso.compress.guard import Guard
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.selection import broadcast_decision

# Every so many events, so that training makes up for the last operator first.
EVENTS = 4
# An operator that saves this share of the cost may raise the loss by the whole tolerance, and one
# that saves less by as much less.
WORTH = 0.1


def remove_operator_(state: ModelState, guard: Guard, rules: EventRules) -> Decision:
    """Remove one operator, or none; returns what was cut.

    Every rank calls this at the same step and makes the same probes. Rank 0 decides.
    """
    due = rules.step % (EVENTS * rules.interval) == 0
    fixed = any(term.fixed for term in state.plan.terms)
    if not (due and fixed and rules.pressing and guard.measures):
        return NOTHING
    harms = _harms(state, guard)
    decision = broadcast_decision(state.team, lambda: _choose(state, rules, harms))
    if decision is None or not decision.dropped():
        return NOTHING
    when = f"after the removal of an operator at step {rules.step}"
    cut_ = partial(state.cut_, decision, when)
    stays = guard.try_("operator", cut_, state.snapshot_modules, rules.tolerance)
    return decision if stays else NOTHING


def _harms(state: ModelState, guard: Guard) -> dict[str, float]:
    """Operator -> how much more loss the batch has without it."""
    assert guard.loss is not None
    table, tensors = state.table, named_tensors(state.model)
    return {
        owner: guard.loss_without(table, tensors, _without(state, owner)) - guard.loss
        for owner in table.owners()
        if owner not in table.required
    }


def _without(state: ModelState, owner: str) -> dict[str, Tensor]:
    keeps = {name: torch.ones(size, dtype=torch.bool) for name, size in state.widths().items()}
    for name in state.table.owners()[owner]:
        keeps[name].zero_()
    return keeps


def _choose(state: ModelState, rules: EventRules, harms: dict[str, float]) -> Decision | None:
    """The removal that costs least for what it saves, if it is worth it and no hook objects."""
    tensors = state.readable()
    rms = channel_rms(state.plan.penalty.groups, state.plan.store.weight)
    least, chosen = math.inf, None
    for owner, harm in harms.items():
        keeps = _without(state, owner)
        multiples = state.options.multiple, state.plan.preferred
        decision = close_and_round(state.table, tensors, keeps, rms, *multiples)
        if decision is None or owner not in decision.removed:
            continue
        work = state.work_after(decision)
        saved = 1 - work / state.fma
        if saved <= 0 or work < rules.fma_target or not math.isfinite(harm):
            continue
        # A harm below zero is noise: among such operators the one goes that saves most.
        cost = harm / saved if harm > 0 else -saved
        if harm <= rules.tolerance * min(saved / WORTH, 1.0) and cost < least:
            consult_(rules.hooks, rules.step, keeps, rms, state.prices)
            if not any(bool(keeps[name].any()) for name in state.table.owners()[owner]):
                least, chosen = cost, decision
    return chosen
