"""Whole operators: one goes at once where the batch can do without it for what it costs.

An operator takes some milliseconds at any width. Pressure makes it narrow, and never has it leave
while a few of its channels matter a little. So the loss without an operator is measured, and the
one goes that costs the batch least for what it saves.
"""

from functools import partial

from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.compress.drop import NOTHING, Decision
from gaugelasso.compress.events import EventRules, consult_
from gaugelasso.compress.guard import Guard
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.ranking import DropPlanner
from gaugelasso.compress.selection import broadcast_decision

# Every so many events, so that training makes up for the last operator first.
EVENTS = 4
# An operator that saves this share of the cost may raise the loss by all that an operator may, and
# one that saves less by as much less.
WORTH = 0.1
# One forward pass for so many steps: a few percent of the time of training.
STEPS_PER_PROBE = 10


def remove_operator_(state: ModelState, guard: Guard, rules: EventRules) -> Decision:
    """Remove one operator, or none; returns what was cut.

    Every rank calls this at the same step and makes the same probes. Rank 0 decides.
    """
    apart = EVENTS * rules.interval
    fixed = any(term.fixed for term in state.plan.terms)
    if rules.step % apart or not (fixed and rules.pressing and guard.measures):
        return NOTHING
    team, table, tensors = state.team, state.table, named_tensors(state.model)
    planner = DropPlanner(state)
    savings = team.broadcast(_savings(state, planner, rules) if team.rank == 0 else {})
    turn = in_turn(list(savings), rules.step // apart, max(1, apart // STEPS_PER_PROBE))
    assert guard.before is not None
    assert guard.loss is not None
    room = guard.before + rules.operator_allowance - guard.loss
    costs = {}
    for owner in turn:
        harm = guard.loss_without(table, tensors, _without(state, planner, owner)) - guard.loss
        saved = savings[owner]
        if harm <= min(room, rules.operator_allowance * min(saved / WORTH, 1.0)):
            # A harm below zero is noise: of such operators the one goes that saves most.
            costs[owner] = harm / saved if harm > 0 else -saved
    decision = broadcast_decision(team, lambda: _first_allowed(state, planner, rules, costs))
    if decision is None:
        return NOTHING
    cut_ = partial(state.cut_, decision, f"after the removal of an operator at step {rules.step}")
    stays = guard.try_("operator", cut_, state.snapshot_modules, rules.operator_allowance)
    return decision if stays else NOTHING


def in_turn(names: list[str], turn: int, most: int) -> list[str]:
    """At most so many of the names: the next ones at each turn."""
    begin = turn * most % max(len(names), 1) if most < len(names) else 0
    return (names[begin:] + names[:begin])[:most]


def _savings(state: ModelState, planner: DropPlanner, rules: EventRules) -> dict[str, float]:
    """Operator -> the share of the cost that it saves, for those that may go."""
    found = {}
    for owner in state.table.owners():
        if owner in state.table.required:
            continue
        decision = planner.closed(_without(state, planner, owner))
        if decision is not None and owner in decision.removed:
            work = state.work_after(decision)
            if rules.fma_target <= work < state.fma:
                found[owner] = 1 - work / state.fma
    return found


def _without(state: ModelState, planner: DropPlanner, owner: str) -> dict[str, Tensor]:
    keeps = planner.keep_all()
    for name in state.table.owners()[owner]:
        keeps[name].zero_()
    return keeps


def _first_allowed(
    state: ModelState, planner: DropPlanner, rules: EventRules, costs: dict[str, float]
) -> Decision | None:
    """The removal of the first operator, least cost first, that no hook keeps a channel of."""
    for owner in sorted(costs, key=costs.__getitem__):
        keeps = _without(state, planner, owner)
        consult_(rules.hooks, rules.step, keeps, planner.rms, state.prices)
        if not any(bool(keeps[name].any()) for name in state.table.owners()[owner]):
            return planner.closed(keeps)
    return None
