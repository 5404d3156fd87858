"""The choice of an event: what goes, by everyone who has a say in it.

What is near zero, as far as hooks let it go, as the batch does not miss it and as a work target
asks for it. Rank 0 chooses for all. Changes nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from gaugelasso.accord import shared_decision, shared_keeps
from gaugelasso.axes import named_tensors
from gaugelasso.body import Body
from gaugelasso.budget import no_further
from gaugelasso.drop import Decision, added, candidates, channel_rms, settle
from gaugelasso.events import DropHook, consult_
from gaugelasso.guard import Guard
from gaugelasso.penalty import ranked


@dataclass(frozen=True)
class Choice:
    """`decision` is None if it would end the network.

    Of what might have gone, by axis: how many the batch spares, how many the target withholds.
    """

    decision: Decision | None
    spared: dict[str, int]
    withheld: dict[str, int]


def choose(
    body: Body,
    guard: Guard,
    hooks: Sequence[DropHook],
    step: int,
    threshold: float,
    fma_target: float,
) -> Choice:
    table, plan, team, multiple = body.table, body.plan, body.team, body.options.multiple
    tensors, readable = named_tensors(body.model), body.readable()
    rms = channel_rms(plan.penalty.groups, plan.store.weight)

    def near_zero() -> dict[str, Tensor]:
        keeps = candidates(table, readable, rms, threshold, multiple)
        consult_(hooks, step, keeps, rms, plan.prices)
        return keeps

    def settled(keeps: dict[str, Tensor]) -> Decision | None:
        return settle(table, readable, keeps, rms, multiple)

    def ranking() -> Iterator[tuple[str, int]]:
        utility = plan.penalty.utility(plan.store.weight)
        return ((name, index) for _, name, index in ranked(utility, plan.prices))

    proposed = shared_keeps(team, near_zero)
    allowed = guard.spare(table, tensors, proposed)
    spared = added(proposed, allowed)
    decision = whole = shared_decision(team, lambda: settled(allowed))

    def work(keeps: dict[str, Tensor]) -> float:
        left = whole if keeps is allowed else settled(keeps)
        return -math.inf if left is None else body.work_after(left)

    if fma_target:
        some = shared_keeps(team, lambda: no_further(allowed, work, fma_target, ranking))
        # Where drops make up for each other a part may cost more than the whole, which then goes.
        if added(allowed, some) and guard.allows(table, tensors, some):
            decision = shared_decision(team, lambda: settled(some))
    before = whole.keeps if whole else allowed
    return Choice(decision, spared, added(before, decision.keeps) if decision else {})
