"""The budget: a work target is met by the last cut, and not passed by more than it must."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gaugelasso.budget import no_further
from gaugelasso.compressor import Compressor, CompressorOptions
from gaugelasso.drop import Decision
from gaugelasso.models import Transformer
from gaugelasso.runs import read_rows
from tests.test_compressor import FILTERS, SPEC, fade_
from tests.training import finish, read

SITES = "D"


# --- by itself --------------------------------------------------------------------------


def kept(decision: Decision) -> float:
    return float(sum(int(keep.sum()) for keep in decision.keeps.values()))


@pytest.mark.parametrize("target", range(7))
def test_as_few_go_as_the_target_needs_and_the_first_in_order(target: int) -> None:
    keeps = {"a": torch.tensor([True, False, False]), "b": torch.tensor([False, True, False])}
    order = [("b", 2), ("a", 0), ("a", 2), ("b", 1), ("a", 1), ("b", 0)]
    going = [(name, index) for name, index in order if not keeps[name][index]]
    decision = no_further(Decision, keeps, kept, target, lambda: order)
    assert decision is not None
    number = min(6 - target, len(going))
    gone = {(name, i) for name, keep in decision.keeps.items() for i in range(3) if not keep[i]}
    assert gone == set(going[:number])


def test_nobody_is_asked_for_an_order_above_the_target() -> None:
    keeps = {"a": torch.tensor([True, False])}
    whole = no_further(Decision, keeps, kept, 1.0, lambda: pytest.fail("asked"))
    assert whole is not None
    assert whole.keeps == keeps


def test_a_cut_that_would_end_the_network_is_none() -> None:
    assert no_further(lambda keeps: None, {}, kept, 5.0, list) is None


def test_steps_in_work_are_passed_by_no_more_than_one_of_them() -> None:
    """As where widths are rounded: some drops change nothing until others join them."""

    def by_pairs(keeps: dict[str, Tensor]) -> Decision:
        (keep,) = keeps.values()
        even = keep.clone()
        even[1::2] = even[::2] = keep[1::2] | keep[::2]
        return Decision({"a": even})

    keeps = {"a": torch.zeros(10, dtype=torch.bool)}
    order = [("a", i) for i in range(10)]
    decision = no_further(by_pairs, keeps, kept, 5.0, lambda: order)
    assert decision is not None
    assert kept(decision) == 4


# --- in an event ------------------------------------------------------------------------


def start(fma_target: float) -> Compressor:
    model = Transformer(SPEC).double()
    compressor = Compressor(model, 1e9, CompressorOptions(lr=1e-3), fma_target=fma_target)
    for indices, name in (([0, 1, 3, 4], FILTERS), ([2, 5], SITES)):
        fade_(compressor, name, indices)
    return compressor


def test_a_cut_stops_at_the_target_and_would_not_meet_it_with_one_drop_less() -> None:
    free = start(0.0)
    full = free.fma
    free.event_()
    least = free.fma
    reached = set()
    for share in torch.linspace(0, 1, 9).tolist():
        target = least + share * (full - least)
        compressor = start(target)
        prices = compressor.prices
        event = compressor.event_()
        dropped = sum(event.dropped.values())
        assert event.fma <= target
        if dropped:
            dearest = max(float(values.max()) for values in prices.values())
            assert event.fma > target - dearest
        reached.add(event.fma)
    assert {least, full} <= reached
    assert len(reached) > 4


def test_what_a_decision_leaves_is_counted_before_the_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compressor = start(0.0)
    counted = []
    after = compressor._body.work_after

    def work_after(decision: Decision) -> float:
        counted.append(after(decision))
        return counted[-1]

    monkeypatch.setattr(compressor._body, "work_after", work_after)
    event = compressor.event_()
    assert counted == [event.fma]
    assert event.fma < event.fma_before


def test_a_run_ends_at_its_work_target(tmp_path: Path) -> None:
    free, run = finish(tmp_path, "free"), finish(tmp_path, target__fma=450, train__saturation=7)
    passed = [event["fma"] for event in read_rows(free / "events.jsonl")]
    assert 450 not in passed
    below = next(fma for fma in passed if fma < 450)
    assert below < read(run / "summary.json")["fma_final"] <= 450
