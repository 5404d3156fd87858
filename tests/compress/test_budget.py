"""The budget: a work target is met by the last cut, and not passed by more than it must."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso.axes import named_tensors
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.compress.drop import Decision
from gaugelasso.compress.selection import Keeps, trim_to_work_target
from gaugelasso.models import Transformer
from gaugelasso.runs.reading import read_rows
from tests.compress.small_compressor import FILTERS, SPEC, fade_, train
from tests.tiny_runs import finish, finished, read

SITES = "D"


# --- by itself --------------------------------------------------------------------------


def kept(keeps: Keeps) -> float:
    return float(sum(int(keep.sum()) for keep in keeps.values()))


def gone(keeps: Keeps) -> set[tuple[str, int]]:
    return {(name, i) for name, keep in keeps.items() for i in range(len(keep)) if not keep[i]}


@pytest.mark.parametrize("target", range(7))
def test_as_few_go_as_the_target_needs_and_the_first_in_order(target: int) -> None:
    keeps = {"a": torch.tensor([True, False, False]), "b": torch.tensor([False, True, False])}
    order = [("b", 2), ("a", 0), ("a", 2), ("b", 1), ("a", 1), ("b", 0)]
    going = [(name, index) for name, index in order if not keeps[name][index]]
    chosen = trim_to_work_target(keeps, kept, target, lambda: order)
    assert gone(chosen) == set(going[: 6 - target])


@pytest.mark.parametrize("second", [True, False], ids=["nothing goes", "above the target"])
def test_nobody_is_asked_for_an_order_where_there_is_no_choice(second: bool) -> None:
    keeps = {"a": torch.tensor([True, second])}
    target = 5.0 if second else 1.0
    assert trim_to_work_target(keeps, kept, target, lambda: pytest.fail("asked")) is keeps


def test_work_that_falls_by_steps_is_passed_by_no_more_than_one_of_them() -> None:
    """As where widths are rounded: some drops change nothing until others join them."""

    def by_pairs(keeps: Keeps) -> float:
        return 2 * math.ceil(kept(keeps) / 2)

    keeps = {"a": torch.zeros(10, dtype=torch.bool)}
    order = [("a", i) for i in range(10)]
    assert kept(trim_to_work_target(keeps, by_pairs, 5.0, lambda: order)) == 4


def test_where_all_would_end_the_network_as_many_go_as_the_target_needs() -> None:
    def work(keeps: Keeps) -> float:
        return kept(keeps) or -math.inf

    keeps = {"a": torch.zeros(4, dtype=torch.bool)}
    order = [("a", i) for i in range(4)]
    assert kept(trim_to_work_target(keeps, work, 3.0, lambda: order)) == 3
    assert kept(trim_to_work_target(keeps, work, 0.5, lambda: order)) == 1


def test_a_drop_that_leads_far_below_the_target_waits() -> None:
    """As the last channel of an operator does, with which all the others go."""

    def work(keeps: Keeps) -> float:
        return kept(keeps) if keeps["a"][1] else 2.0

    keeps = {"a": torch.zeros(10, dtype=torch.bool)}
    order = [("a", i) for i in range(10)]
    chosen = trim_to_work_target(keeps, work, 6.0, lambda: order)
    assert gone(chosen) == {("a", 0), ("a", 2), ("a", 3), ("a", 4)}
    # It goes where the target is as low.
    assert not trim_to_work_target(keeps, work, 2.5, lambda: order)["a"][1]


# --- in an event ------------------------------------------------------------------------


def start(
    fma_target: float, probe: Callable[[Transformer], float] | None = None, **options: Any
) -> Compressor:
    model = Transformer(SPEC).double()
    return Compressor(
        model,
        1e9,
        CompressorOptions(**({"lr": 1e-3} | options)),
        (lambda: probe(model)) if probe else None,
        fma_target=fma_target,
    )


def faded(fma_target: float, **more: Any) -> Compressor:
    """Four filters and two sites might go."""
    compressor = start(fma_target, **more)
    for name, indices in ((FILTERS, [0, 1, 3, 4]), (SITES, [2, 5])):
        fade_(compressor, name, indices)
    return compressor


def asked_for_two(loss: Callable[[set[int]], float] = lambda silent: 0.0) -> Compressor:
    """Of four filters that might go; `loss` is that of a model without these filters."""

    def probe(model: Transformer) -> float:
        up = model.operators["mlp_0"].up
        silent = up.abs().amax(0).eq(0).nonzero().view(-1).tolist()
        return loss(set(silent) if up.shape[1] == 5 else set(range(-(5 - up.shape[1]), 0)))

    compressor = start(0.0, probe, drop_tolerance=0.1)
    compressor.fma_target = compressor.fma - 2 * float(compressor.prices[FILTERS][0])
    fade_(compressor, FILTERS, [0, 1, 3, 4])
    return compressor


@pytest.mark.parametrize("multiple", [1, 2])
def test_cuts_stop_where_their_target_is(multiple: int) -> None:
    free = faded(0.0, multiple=multiple)
    full, all_of_it = free.fma, free.event_()
    assert not all_of_it.withheld
    reached = set()
    for share in torch.linspace(0, 1, 9).tolist():
        target = free.fma + share * (full - free.fma)
        compressor = faded(target, multiple=multiple)
        event = compressor.event_()
        assert free.fma <= event.fma <= target
        # What is withheld and what goes is together what might have gone.
        both = Counter(event.dropped) + Counter(event.withheld)
        assert both == Counter(all_of_it.dropped)
        reached.add(event.fma)
    assert {full, free.fma} <= reached
    assert len(reached) > 2


def test_what_gives_least_for_its_cost_goes_first_and_one_less_would_not_do() -> None:
    compressor = start(0.0, sinkhorn_sweeps=0, norm_rate=0, anchor=0)
    price, before = float(compressor.prices[FILTERS][0]), compressor.fma
    compressor.fma_target = before - 2 * price
    up = named_tensors(compressor.model)["operators.mlp_0.up"].detach()
    for strength, index in enumerate([3, 0, 4, 1]):
        fade_(compressor, FILTERS, [index])
        up[:, index] *= 10**strength
    assert compressor.utility()[FILTERS].argsort().tolist() == [3, 0, 4, 1, 2]
    up = up.clone()
    event = compressor.event_()
    assert event.fma == before - 2 * price
    assert (event.dropped, event.withheld) == ({FILTERS: 2}, {FILTERS: 2})
    left = named_tensors(compressor.model)["operators.mlp_0.up"]
    assert torch.equal(left, up[:, [1, 2, 4]])


def test_a_veto_makes_others_go() -> None:
    compressor = asked_for_two()
    first = compressor.utility()[FILTERS].argsort().tolist()[0]
    compressor.on_drop(lambda drop: tuple(i for i in drop.indices if i != first))
    event = compressor.event_()
    assert event.fma == compressor.fma_target
    assert event.withheld == {FILTERS: 1}


def test_what_the_batch_misses_makes_others_go() -> None:
    compressor = asked_for_two(lambda silent: 1e9 * (first in silent))
    first = compressor.utility()[FILTERS].argsort().tolist()[0]
    event = compressor.event_()
    assert event.fma == compressor.fma_target
    assert (event.spared, event.withheld) == ({FILTERS: 1}, {FILTERS: 1})


def test_where_a_part_costs_more_than_the_whole_the_whole_goes() -> None:
    """The batch does without all four or one of them, not without the two that would do."""
    compressor = asked_for_two(lambda silent: 1e9 * (len(silent) in (2, 3)))
    event = compressor.event_()
    assert event.dropped == {FILTERS: 4}
    assert not event.withheld
    assert not event.spared
    assert not event.undone


def test_what_a_decision_leaves_is_counted_before_the_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compressor = faded(1.0)
    counted = []
    after = compressor.state.work_after

    def work_after(decision: Decision) -> float:
        counted.append(after(decision))
        return counted[-1]

    monkeypatch.setattr(compressor.state, "work_after", work_after)
    event = compressor.event_()
    assert counted == [event.fma]
    assert event.fma < event.fma_before


# --- afterwards -------------------------------------------------------------------------


def test_nothing_presses_once_the_target_is_met() -> None:
    compressor = start(0.0, interval=2)
    train(compressor, 2)
    assert float(compressor.rho) > 0
    price = float(compressor.prices[FILTERS][0])
    compressor.fma_target = compressor.fma - price
    fade_(compressor, FILTERS, [0, 1, 3])
    event = train(compressor, 2)[-1]
    assert event.dropped == {FILTERS: 1}
    assert compressor.work_target_met
    assert train(compressor, 4) == [None] * 4
    assert float(compressor.rho) == 0
    compressor.set_pressure_(1.0)
    assert train(compressor, 4) == [None] * 4
    assert float(compressor.rho) == 0


def test_a_model_below_its_target_is_never_pressed() -> None:
    compressor = start(1e9, interval=2)
    assert train(compressor, 4) == [None] * 4
    assert float(compressor.rho) == 0


def test_a_state_that_is_loaded_presses_no_more_where_its_target_is_met() -> None:
    saved = start(0.0, interval=2)
    train(saved, 1)
    compressor = start(saved.fma, interval=2)
    compressor.load_state_tensors_(saved.state_tensors(), saved.steps)
    assert train(compressor, 3) == [None] * 3
    assert float(compressor.rho) == 0
    # With a lower one it does again, once it is asked to.
    compressor.fma_target = 1.0
    compressor.set_pressure_(1.0)
    train(compressor, 2)
    assert float(compressor.rho) > 0


def test_a_run_ends_at_its_work_target(tmp_path: Path) -> None:
    free, run = finished(tmp_path, "free"), finish(tmp_path, target__fma=450, train__saturation=7)
    passed = [event["fma"] for event in read_rows(free / "events.jsonl")]
    assert 450 not in passed
    below = next(fma for fma in passed if fma < 450)
    assert below < read(run / "summary.json")["fma_final"] <= 450
    *_, last = read_rows(run / "events.jsonl")
    assert last["withheld"]
