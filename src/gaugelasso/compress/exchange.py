"""Channel exchange: work moves from the axes that use it least to those that use it most.

The paper names the mechanism and does not specify it. Here, at the same work per token, axes whose
utility per unit of work is below the mean of those that may grow give their least useful indices,
and axes above it grow by what these paid for. Both are one change, under the guard of the event.
What cannot be spent is mostly not taken, and an exchange that spends too little is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gaugelasso.axes import Axis, Tensors, named_tensors, width
from gaugelasso.compress import growth, pricing, surgery
from gaugelasso.compress.drop import (
    Decision,
    channel_rms,
    close_and_round,
    dominates_norm,
    grains,
)
from gaugelasso.compress.events import EventRules, consult_
from gaugelasso.compress.guard import Guard
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.penalty import ranked
from gaugelasso.compress.selection import broadcast_decision, broadcast_keeps

# The share of the work that one exchange moves, if one index does not cost more; and the largest
# share that one index may cost.
SHARE, MOST = 0.02, 0.1
# The share of what was taken that has to be spent: else it would be a cut, not an exchange.
SPENT = 0.5


@dataclass(frozen=True)
class Exchange:
    """What an exchange did: axis name -> number of indices that were cut, and that were added."""

    taken: dict[str, int] = field(default_factory=dict)
    grown: dict[str, int] = field(default_factory=dict)


def exchange_(state: ModelState, guard: Guard, rules: EventRules) -> Exchange:
    """Exchange channels, if a receiver can be paid for; every rank calls this at the same step.

    Rank 0 decides, as in `select_drops`; probes and broadcasts are the same on all ranks.
    """
    team, table, tensors = state.team, state.table, named_tensors(state.model)
    plan = _Plan(state, rules)
    offered = broadcast_keeps(team, plan.offer)
    allowed = guard.keep_needed(table, tensors, offered)
    decision = broadcast_decision(team, lambda: plan.close(allowed))
    births = team.broadcast(plan.births)
    if decision is None or not births:
        return Exchange()
    assert state.births is not None
    generator = state.births.generator(rules.step)

    def change_() -> None:
        when = f"of the exchange of step {rules.step}"
        state.cut_(decision, f"after the cut {when}")
        state.grow_(births, generator, f"after the growth {when}", rules.step)

    if not guard.try_("exchange", change_, state.snapshot_modules):
        return Exchange()
    return Exchange(decision.dropped(), growth.grown_widths(table, births))


def totals(
    utility: Mapping[str, Tensor],
    prices: Mapping[str, np.ndarray],
    protected: Mapping[str, Tensor],
) -> dict[str, tuple[float, float]]:
    """Axis name -> its utility and its work, as the sums over its indices.

    Without new indices, which have had no time, and without axes of no price.
    """
    found = {}
    for name, values in utility.items():
        old = (~protected[name]).numpy()
        work = float(prices[name][old].sum())
        if work > 0:
            found[name] = float(values.double().cpu().numpy()[old].sum()), work
    return found


class _Plan:
    """The parts of an exchange that rank 0 computes alone. No collectives."""

    def __init__(self, state: ModelState, rules: EventRules):
        assert state.births is not None
        self._state, self._rules = state, rules
        self._tensors = state.readable()
        self._rms = channel_rms(state.plan.penalty.groups, state.plan.store.weight)
        self._protected = state.births.protected(rules.step)
        self._utility = state.utility()
        sums = totals(self._utility, state.prices, self._protected)
        self._yields = {name: utility / work for name, (utility, work) in sums.items()}
        self._widths = state.widths()
        self._multiples = state.options.multiple, state.plan.preferred
        self._grains = grains(state.table, *self._multiples)
        able = [name for name in sums if self._able(state.table[name])]
        # Of the axes that may grow: the others have no part in the choice.
        utility, work = (sum(sums[name][part] for name in able) for part in (0, 1))
        self._mean = utility / work if able else 0.0
        above = [name for name in able if self._yields[name] > self._mean]
        above.sort(key=self._yields.__getitem__, reverse=True)
        self._receivers = [state.table[name] for name in above]
        self.births: dict[str, int] = {}  # what the decision of `close` pays for

    def _able(self, axis: Axis) -> bool:
        """Whether an axis has room, and one index of it is not too much work.

        An axis with new indices waits until these have shown what they are worth.
        """
        grain = self._grains[axis.name]
        if bool(self._protected[axis.name].any()):
            return False
        room = self._room(axis, self._tensors)
        return room >= grain and 0 < self._cost({axis.name: grain}) <= MOST * self._state.fma

    def _room(self, axis: Axis, tensors: Tensors) -> float:
        """How many new indices of an axis can have a use."""
        free = growth.room(self._state.table, axis, tensors)
        return min(free, growth.rank(axis, tensors) - width(axis, tensors))

    def _work(self, widths: Mapping[str, int], births: Mapping[str, int]) -> float:
        added = growth.grown_widths(self._state.table, births)
        total = {name: size + added.get(name, 0) for name, size in widths.items()}
        return float(pricing.count(self._state.plan.terms, total))

    def _cost(self, births: Mapping[str, int]) -> float:
        return self._work(self._widths, births) - self._state.fma

    def offer(self) -> dict[str, Tensor]:
        """Keep-sets without the indices of axes below the mean that give least for their work.

        Together they pay for one index of the first receiver, and for SHARE of the work, as far as
        the receivers have room for it.
        """
        state = self._state
        keeps = {name: torch.ones(size, dtype=torch.bool) for name, size in self._widths.items()}
        if not self._receivers:
            return keeps
        first = self._receivers[0].name
        most = max(self._cost({first: self._grains[first]}), SHARE * state.fma)
        room = {axis.name: self._room(axis, self._tensors) for axis in self._receivers}
        budget = self._cost(self._fill(self._widths, room, state.fma + most))
        held = self._held()
        for _, name, index in ranked(self._utility, state.prices):
            if budget <= 0:
                break
            if self._yields.get(name, self._mean) < self._mean and not held[name][index]:
                keeps[name][index] = False
                budget -= float(state.prices[name][index])
        consult_(self._rules.hooks, self._rules.step, keeps, self._rms, state.prices)
        return keeps

    def _held(self) -> dict[str, Tensor]:
        """The indices that an exchange does not take: new ones, and the strongest of each axis."""
        norms = dominates_norm(self._state.table, self._tensors)
        held = {name: norms[name] | new for name, new in self._protected.items()}
        for name, values in self._rms.items():
            if len(values):
                held[name][values.argmax()] = True
        return held

    def close(self, keeps: dict[str, Tensor]) -> Decision | None:
        """What the taken indices lead to, without those that the receivers cannot spend.

        None if nothing is left to take, too little of it can be spent, or an operator goes.
        """
        if not self._receivers or (decision := self._closed(keeps)) is None:
            return None
        births = self._births(decision)
        unspent = self._unspent(decision, births)
        fewer = self._closed(self._given_back(keeps, unspent))
        if fewer is not None:
            again = self._births(fewer)
            if (left := self._unspent(fewer, again)) < unspent:
                decision, births, unspent = fewer, again, left
        if unspent > (1 - SPENT) * self._unspent(decision, {}):
            return None
        self.births = births
        return decision

    def _closed(self, keeps: dict[str, Tensor]) -> Decision | None:
        if all(bool(keep.all()) for keep in keeps.values()):
            return None
        given = keeps, self._rms, *self._multiples
        decision = close_and_round(self._state.table, self._tensors, *given)
        return None if decision is None or decision.removed else decision

    def _unspent(self, decision: Decision, births: Mapping[str, int]) -> float:
        """The work that a cut saves and the births after it do not use."""
        return float(self._state.fma - self._work(_widths(decision), births))

    def _given_back(self, keeps: Mapping[str, Tensor], unspent: float) -> dict[str, Tensor]:
        """Keep-sets with the most useful of the taken indices again that cost no more than this."""
        fewer = {name: keep.clone() for name, keep in keeps.items()}
        for _, name, index in reversed(ranked(self._utility, self._state.prices)):
            price = float(self._state.prices[name][index])
            if not fewer[name][index] and price <= unspent:
                fewer[name][index] = True
                unspent -= price
        return fewer

    def _births(self, decision: Decision) -> dict[str, int]:
        """As many new indices as the cut pays for: one for each receiver in turn, best first."""
        widths = _widths(decision)
        # Not what the cascade took from, nor a stream together with an axis that reaches it.
        able = [axis for axis in self._receivers if widths[axis.name] == self._widths[axis.name]]
        table, left = self._state.table, named_tensors(self._state.model)
        left = surgery.cut(left, table, decision.keeps)  # it may have taken sites
        room = {axis.name: self._room(axis, left) for axis in able}
        return self._fill(widths, room, self._state.fma)

    def _fill(
        self, widths: Mapping[str, int], room: Mapping[str, float], work: float
    ) -> dict[str, int]:
        """New indices for the axes of `room` in turn, as long as the work allows one more."""
        births: dict[str, int] = {}
        able = list(room)
        while able:
            still = []
            for name in able:
                more = {**births, name: births.get(name, 0) + self._grains[name]}
                fits = more[name] <= room[name]
                if fits and self._apart(more) and self._work(widths, more) <= work:
                    births = more
                    still.append(name)
            able = still
        return births

    def _apart(self, births: Mapping[str, int]) -> bool:
        """Whether no axis of these is reached by another: room is that of each alone."""
        table = self._state.table
        homes = {table.home(slot) for name in births for slot in table[name].linked()}
        return not homes & births.keys()


def _widths(decision: Decision) -> dict[str, int]:
    """Axis name -> width after the cut."""
    return {name: int(keep.sum()) for name, keep in decision.keeps.items()}
