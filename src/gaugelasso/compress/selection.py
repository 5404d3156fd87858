"""The choice of an event: what goes, by everyone who has a say in it.

What is near zero, as far as hooks let it go, as the batch does not miss it and as a work target
asks for it. Rank 0 chooses for all. Changes nothing.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.compress.drop import Decision, candidates, channel_rms, close_and_round, newly_kept
from gaugelasso.compress.events import DropHook, consult_
from gaugelasso.compress.guard import Guard
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.penalty import ranked
from gaugelasso.distributed import Team

Keeps = dict[str, Tensor]


@dataclass(frozen=True)
class Choice:
    """`decision` is None if it would end the network.

    Of what might have gone, by axis: how many the batch spares, how many the target withholds.
    """

    decision: Decision | None
    spared: dict[str, int]
    withheld: dict[str, int]


def select_drops(
    state: ModelState,
    guard: Guard,
    hooks: Sequence[DropHook],
    step: int,
    threshold: float,
    fma_target: float,
) -> Choice:
    table, plan, team, multiple = state.table, state.plan, state.team, state.options.multiple
    tensors, readable = named_tensors(state.model), state.readable()
    rms = channel_rms(plan.penalty.groups, plan.store.weight)

    def near_zero() -> dict[str, Tensor]:
        keeps = candidates(table, readable, rms, threshold, multiple)
        consult_(hooks, step, keeps, rms, plan.prices)
        return keeps

    def settled(keeps: dict[str, Tensor]) -> Decision | None:
        return close_and_round(table, readable, keeps, rms, multiple)

    def ranking() -> Iterator[tuple[str, int]]:
        utility = plan.penalty.utility(plan.store.weight)
        return ((name, index) for _, name, index in ranked(utility, plan.prices))

    proposed = shared_keeps(team, near_zero)
    allowed = guard.keep_needed(table, tensors, proposed)
    spared = newly_kept(proposed, allowed)
    decision = whole = shared_decision(team, lambda: settled(allowed))

    def work(keeps: dict[str, Tensor]) -> float:
        left = whole if keeps is allowed else settled(keeps)
        return -math.inf if left is None else state.work_after(left)

    if fma_target:
        some = shared_keeps(team, lambda: trim_to_work_target(allowed, work, fma_target, ranking))
        # Where drops make up for each other a part may cost more than the whole, which then goes.
        if newly_kept(allowed, some) and guard.allows(table, tensors, some):
            decision = shared_decision(team, lambda: settled(some))
    before = whole.keeps if whole else allowed
    return Choice(decision, spared, newly_kept(before, decision.keeps) if decision else {})


def trim_to_work_target(
    keeps: Keeps,
    work: Callable[[Keeps], float],
    target: float,
    order: Callable[[], Iterable[tuple[str, int]]],
) -> Keeps:
    """The shortest run of drops that brings work to `target`; all of them if none does.

    `work` is what is left to do after keep-sets are carried out, and never more for another
    drop. `order` is asked only where a choice has to be made: every index, first to go first.
    """
    if all(bool(keep.all()) for keep in keeps.values()) or work(keeps) >= target:
        return keeps
    drops = [(name, index) for name, index in order() if not keeps[name][index]]

    def first(number: int) -> Keeps:
        some = {name: torch.ones_like(keep) for name, keep in keeps.items()}
        for name, index in drops[:number]:
            some[name][index] = False
        return some

    return first(bisect_left(range(len(drops)), True, key=lambda n: work(first(n)) <= target))


def shared_keeps(team: Team, decide: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The keep-sets that rank 0 decides, on every rank; the others are not asked."""
    if team.size == 1:
        return decide()
    mine = decide() if team.rank == 0 else {}
    told = team.broadcast({name: keep.tolist() for name, keep in mine.items()})
    return {name: torch.tensor(keep, dtype=torch.bool) for name, keep in told.items()}


def shared_decision(team: Team, decide: Callable[[], Decision | None]) -> Decision | None:
    """Rank 0's last word on an event, on every rank."""
    if team.size == 1:
        return decide()
    mine = decide() if team.rank == 0 else None
    removed = team.broadcast(list(mine.removed) if mine else None)
    if removed is None:
        return None
    return Decision(shared_keeps(team, lambda: mine.keeps if mine else {}), tuple(removed))
