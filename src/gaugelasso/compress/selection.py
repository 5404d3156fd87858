"""The selection of drops: which indices an event removes.

In this order: rank 0 proposes indices near zero and calls the hooks, the batch keeps what it
needs, the cascade closes the rest, and a work target trims it. Changes nothing.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.compress.drop import Decision, candidates, channel_rms, close_and_round, newly_kept
from gaugelasso.compress.events import EventRules, consult_
from gaugelasso.compress.guard import Guard
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.penalty import ranked
from gaugelasso.distributed import Team

Keeps = dict[str, Tensor]
# A drop that leads below this share of the work target waits: it is the last channel of an
# operator, which would go as a whole.
LEAST_SHARE = 0.75


@dataclass(frozen=True)
class Choice:
    """`decision` is None if the drops would remove a required operator.

    `spared` counts by axis the proposed indices that the batch needs, `withheld` those that are
    not needed to meet the work target.
    """

    decision: Decision | None
    spared: dict[str, int]
    withheld: dict[str, int]


def select_drops(state: ModelState, guard: Guard, rules: EventRules) -> Choice:
    """Select what an event cuts.

    All collectives are here: the broadcasts, and the guard's probes, which average over ranks.
    Every rank makes the same calls in the same order, because all conditions depend only on
    values that are equal on all ranks: options, broadcast values and probed losses.
    """
    team, table, tensors = state.team, state.table, named_tensors(state.model)
    local = _LocalSelection(state, rules)

    proposed = broadcast_keeps(team, local.propose)
    allowed = guard.keep_needed(table, tensors, proposed)
    spared = newly_kept(proposed, allowed)
    closed = broadcast_decision(team, lambda: local.close(allowed))
    if not rules.fma_target:
        return Choice(closed, spared, {})

    trimmed = broadcast_keeps(team, lambda: local.trim(allowed, closed))
    # Drops can compensate for each other, so that a part of them costs more than all of them. In
    # that case all of them are made.
    if not newly_kept(allowed, trimmed) or not guard.allows(table, tensors, trimmed):
        return Choice(closed, spared, {})
    decision = broadcast_decision(team, lambda: local.close(trimmed))
    before = closed.keeps if closed else allowed
    return Choice(decision, spared, newly_kept(before, decision.keeps) if decision else {})


class _LocalSelection:
    """The parts of the selection that rank 0 computes alone. No collectives."""

    def __init__(self, state: ModelState, rules: EventRules):
        self._state, self._rules = state, rules
        self._tensors = state.readable()
        self._rms = channel_rms(state.plan.penalty.groups, state.plan.store.weight)

    def propose(self) -> Keeps:
        """Keep-sets by trust-drop, with new indices and what the hooks keep."""
        state, rules = self._state, self._rules
        keeps = candidates(
            state.table, self._tensors, self._rms, rules.threshold, *self._multiples()
        )
        if state.births is not None:
            for name, new in state.births.protected(rules.step).items():
                keeps[name] |= new
        consult_(rules.hooks, rules.step, keeps, self._rms, state.prices)
        return keeps

    def close(self, keeps: Keeps) -> Decision | None:
        """Keep-sets closed under the cascade, with widths rounded to multiples."""
        state = self._state
        return close_and_round(state.table, self._tensors, keeps, self._rms, *self._multiples())

    def _multiples(self) -> tuple[int, dict[str, int]]:
        return self._state.options.multiple, self._state.plan.preferred

    def trim(self, keeps: Keeps, closed: Decision | None) -> Keeps:
        """As many of the drops as the work target needs; `closed` is what all of them close to."""

        def work(some: Keeps) -> float:
            decision = closed if some is keeps else self.close(some)
            return -math.inf if decision is None else self._state.work_after(decision)

        return trim_to_work_target(keeps, work, self._rules.fma_target, self._ranking)

    def _ranking(self) -> Iterable[tuple[str, int]]:
        """Every index by utility per price, least first."""
        rows = ranked(self._state.utility(), self._state.prices)
        return ((name, index) for _, name, index in rows)


def trim_to_work_target(
    keeps: Keeps,
    work: Callable[[Keeps], float],
    target: float,
    order: Callable[[], Iterable[tuple[str, int]]],
) -> Keeps:
    """The smallest number of drops, in order, that brings the work to `target`; else all of them.

    Without those that would lead far below it. `work` maps keep-sets to the work that is left, and
    must not grow with another drop. `order` gives every index, first to go first; it is called only
    if there is a choice to make.
    """
    if all(bool(keep.all()) for keep in keeps.values()) or work(keeps) >= target:
        return keeps
    drops = [(name, index) for name, index in order() if not keeps[name][index]]

    def first(number: int) -> Keeps:
        some = {name: torch.ones_like(keep) for name, keep in keeps.items()}
        for name, index in drops[:number]:
            some[name][index] = False
        return some

    while True:
        number = bisect_left(range(len(drops)), True, key=lambda n: work(first(n)) <= target)
        if not number or work(first(number)) >= LEAST_SHARE * target:
            return first(number)
        del drops[number - 1]


def broadcast_keeps(team: Team, decide: Callable[[], Keeps]) -> Keeps:
    """The keep-sets that `decide` returns on rank 0, on every rank."""
    if team.size == 1:
        return decide()
    own = decide() if team.rank == 0 else {}
    message = team.broadcast({name: keep.tolist() for name, keep in own.items()})
    return {name: torch.tensor(keep, dtype=torch.bool) for name, keep in message.items()}


def broadcast_decision(team: Team, decide: Callable[[], Decision | None]) -> Decision | None:
    """The decision that `decide` returns on rank 0, on every rank."""
    if team.size == 1:
        return decide()
    own = decide() if team.rank == 0 else None
    removed = team.broadcast(list(own.removed) if own else None)
    if removed is None:
        return None
    return Decision(broadcast_keeps(team, lambda: own.keeps if own else {}), tuple(removed))
