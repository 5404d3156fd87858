"""Channel exchange: work moves from the axes that use it least to those that use it most.

The paper names the mechanism and does not specify it. Here, at the same work per token, axes whose
utility per unit of work is below the mean of those that may grow give their least useful indices,
and axes above it grow by what these paid for. Both are one change, under the guard of the event.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gaugelasso.axes import Axis, named_tensors
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
    births = team.broadcast(plan.births(decision) if team.rank == 0 and decision else {})
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
    return Exchange(decision.dropped(), births)


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

    def _able(self, axis: Axis) -> bool:
        """Whether an axis has room, and one index of it is not too much work.

        An axis with new indices waits until these have shown what they are worth.
        """
        grain = self._grains[axis.name]
        if bool(self._protected[axis.name].any()):
            return False
        room = growth.room(self._state.table, axis, self._tensors)
        return room >= grain and 0 < self._cost({axis.name: grain}) <= MOST * self._state.fma

    def _work(self, widths: Mapping[str, int], births: Mapping[str, int]) -> float:
        added = growth.grown_widths(self._state.table, births)
        total = {name: size + added.get(name, 0) for name, size in widths.items()}
        return float(pricing.count(self._state.plan.terms, total))

    def _cost(self, births: Mapping[str, int]) -> float:
        return self._work(self._widths, births) - self._state.fma

    def offer(self) -> dict[str, Tensor]:
        """Keep-sets without the indices of axes below the mean that give least for their work.

        Together they pay for one index of the first receiver, and for SHARE of the work.
        """
        state = self._state
        keeps = {name: torch.ones(size, dtype=torch.bool) for name, size in self._widths.items()}
        if not self._receivers:
            return keeps
        first = self._receivers[0].name
        budget = max(self._cost({first: self._grains[first]}), SHARE * state.fma)
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
        """What the taken indices lead to; None if nothing is left to take, or an operator goes."""
        if not self._receivers or all(bool(keep.all()) for keep in keeps.values()):
            return None
        given = keeps, self._rms, *self._multiples
        decision = close_and_round(self._state.table, self._tensors, *given)
        return None if decision is None or decision.removed else decision

    def births(self, decision: Decision) -> dict[str, int]:
        """As many new indices as the cut pays for: one for each receiver in turn, best first."""
        widths = {name: int(keep.sum()) for name, keep in decision.keeps.items()}
        # Not what the cascade took from, nor a stream together with an axis that reaches it.
        able = [axis for axis in self._receivers if widths[axis.name] == self._widths[axis.name]]
        table, left = self._state.table, named_tensors(self._state.model)
        left = surgery.cut(left, table, decision.keeps)  # it may have taken sites
        room = {axis.name: growth.room(table, axis, left) for axis in able}
        births: dict[str, int] = {}
        while able:
            still = []
            for axis in able:
                grain = self._grains[axis.name]
                more = {**births, axis.name: births.get(axis.name, 0) + grain}
                fits = more[axis.name] <= room[axis.name]
                if fits and self._apart(more) and self._work(widths, more) <= self._state.fma:
                    births = more
                    still.append(axis)
            able = still
        return births

    def _apart(self, births: Mapping[str, int]) -> bool:
        """Whether no axis of these is reached by another: room is that of each alone."""
        table = self._state.table
        homes = {table.home(slot) for name in births for slot in table[name].linked()}
        return not homes & births.keys()
