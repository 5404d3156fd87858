"""One structural event: split, balance, select, cut, remove, exchange, each under the guard.

The order of an event, and its record. A change that raises the batch's loss too much is undone.
"""

import time
from typing import TypeVar

from gaugelasso.compress.drop import NOTHING, Decision
from gaugelasso.compress.events import Event, EventRules
from gaugelasso.compress.exchange import Exchange, exchange_
from gaugelasso.compress.guard import Guard
from gaugelasso.compress.harm_event import cut_least_harm_
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.resume_state import ResumeState
from gaugelasso.compress.selection import Choice, select_drops
from gaugelasso.compress.whole_operators import remove_operator_

Number = TypeVar("Number", int, float)


def hold_event_(state: ModelState, resume_state: ResumeState, rules: EventRules) -> Event:
    """Hold an event; every rank calls this at the same step."""
    began, fma_before = time.perf_counter(), state.fma
    resume_state.check_same(rules.step, f"before the event of step {rules.step}")
    guard = Guard(state.model, rules.probe, rules.loss_allowance)
    by_harm = state.harm is not None
    splits = 0 if by_harm else _split_(state, guard)
    prices = state.prices  # after the split: the structure that the cut finds
    if state.balances and not by_harm:
        guard.try_("balance", lambda: state.balance_(rules.pressing), state.snapshot_values)
    loss_balanced = guard.loss
    if by_harm:
        cut, possible = cut_least_harm_(state, guard, rules)
        choice = Choice(cut if possible else None, {}, {})
    else:
        choice = select_drops(state, guard, rules)
        cut = _cut_(state, guard, choice.decision or NOTHING, rules.step)
    prices_then = state.prices
    whole = NOTHING if by_harm else remove_operator_(state, guard, rules)
    due = state.births is not None and state.births.exchange_due_(rules.step, rules.left)
    exchange = exchange_(state, guard, rules) if due else Exchange()
    return Event(
        step=rules.step,
        fma_before=fma_before,
        fma=state.fma,
        dropped=_together(cut.dropped(), whole.dropped()),
        prices=_together(cut.saved(prices), whole.saved(prices_then)),
        removed=cut.removed + whole.removed,
        widths=state.widths(),
        seconds=time.perf_counter() - began,
        loss_before=guard.before,
        loss_balanced=loss_balanced,
        loss_after=guard.loss,
        refused=choice.decision is None,
        splits=splits,
        spared=choice.spared,
        withheld=choice.withheld,
        undone=guard.undone,
        exchanged=exchange.taken,
        grown=exchange.grown,
    )


def _split_(state: ModelState, guard: Guard) -> int:
    """Split what can be split; the number of sites that became two."""
    splits = state.find_splits()
    stay = splits and guard.try_("split", lambda: state.split_(splits), state.snapshot_modules)
    return len(splits) if stay else 0


def _cut_(state: ModelState, guard: Guard, decision: Decision, step: int) -> Decision:
    """Carry a decision out; returns what was cut: the decision, or NOTHING if it was undone."""
    when = f"after the cut of step {step}"
    stays = decision.dropped() and guard.try_(
        "cut", lambda: state.cut_(decision, when), state.snapshot_modules
    )
    return decision if stays else NOTHING


def _together(first: dict[str, Number], second: dict[str, Number]) -> dict[str, Number]:
    """The numbers of both, added where a name is in both."""
    return first | {name: first.get(name, 0) + number for name, number in second.items()}
