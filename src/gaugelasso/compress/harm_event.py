"""A structural event without pressure: cut what does the least harm per unit of price.

Nothing is split or balanced: those prepare for a penalty. A cut that raises the batch's loss too
much is undone, and half of it is tried.
"""

from functools import partial

from gaugelasso.compress.drop import NOTHING, Decision, dominates_norm
from gaugelasso.compress.events import EventRules, consult_
from gaugelasso.compress.guard import Guard
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.ranking import Ranking
from gaugelasso.compress.selection import broadcast_decision

# How often an event tries half of a cut that cost too much.
TRIES = 4
# A site stays that contributes so many times the mean to a normaliser: with its weights large, it
# would leave at once, and what is left of the level would say little.
DOMINATES = 5.0
# Harms are estimates. Those of a cut that was undone are multiplied by this, so that later events
# try other channels.
RAISED = 2.0


def cut_least_harm_(state: ModelState, guard: Guard, rules: EventRules) -> tuple[Decision, bool]:
    """Cut; returns what was cut, and whether there was something to cut.

    Rank 0 decides. Every rank makes the same cuts, and probes give the same loss on all of them.
    """
    ranking = _ranking(state) if state.team.rank == 0 else None
    for number in range(TRIES):
        target = max((1 - rules.cut_share / 2**number) * state.fma, rules.fma_target)
        decision = broadcast_decision(state.team, partial(_decide, ranking, target, state, rules))
        if decision is None or not decision.dropped():
            return NOTHING, decision is not None
        cut_ = partial(state.cut_, decision, f"after the cut of step {rules.step}")
        if guard.try_("cut", cut_, state.snapshot_modules):
            guard.undone.pop("cut", None)  # that of a larger one
            return decision, True
        assert state.harm is not None
        state.harm.raise_(decision.keeps, RAISED)
    return NOTHING, True


def _ranking(state: ModelState) -> Ranking:
    assert state.harm is not None
    held = dominates_norm(state.table, state.readable(), times_mean=DOMINATES)
    return Ranking(state, state.harm.by_axis(), held)


def _decide(
    ranking: Ranking | None, target: float, state: ModelState, rules: EventRules
) -> Decision | None:
    """The drops that bring the work to the target, without those that hooks keep."""
    assert ranking is not None
    keeps = ranking.keeps(ranking.number_to(target))
    consult_(rules.hooks, rules.step, keeps, ranking.rms, state.prices)
    return ranking.closed(keeps)
