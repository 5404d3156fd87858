"""Structural events: when they happen, what hooks may do, what is on record."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from gaugelasso.axes import named_tensors
from gaugelasso.compress.events import Drop
from gaugelasso.models import TransformerSpec
from tests.compress.small_compressor import FILTERS, SPEC, fade_, start, task_loss, train

# --- hooks ---------------------------------------------------------------------------


def test_a_hook_sees_the_drop_before_it_happens() -> None:
    compressor = start()
    fade_(compressor, FILTERS, [1, 3])
    prices, seen = compressor.prices[FILTERS], []

    @compressor.on_drop
    def look(drop: Drop) -> None:
        assert compressor.widths[FILTERS] == SPEC.operators[1].filters
        seen.append(drop)

    compressor.event_()
    (drop,) = seen
    assert (drop.axis, drop.indices) == (FILTERS, (1, 3))
    assert all(0 < rms <= compressor.options.lr for rms in drop.rms)
    assert drop.prices == tuple(prices[[1, 3]])
    assert compressor.widths[FILTERS] == 3


@pytest.mark.parametrize(
    ("answer", "left"),
    [(None, 3), (True, 3), (False, 5), ((), 5), ((3,), 4), ((0, 3), 4)],
    ids=["none", "true", "false", "empty", "subset", "subset and a stranger"],
)
def test_a_hook_decides_what_may_go(answer: Any, left: int) -> None:
    compressor = start()
    fade_(compressor, FILTERS, [1, 3])
    compressor.on_drop(lambda drop: answer)
    event = compressor.event_()
    assert compressor.widths[FILTERS] == left
    assert event.dropped.get(FILTERS, 0) == 5 - left


@pytest.mark.parametrize(
    "answer", [[3], {3}, frozenset({3}), range(3, 4), (np.int64(3),)], ids=lambda a: repr(a)
)
def test_a_hook_may_return_any_collection_of_ints(answer: Any) -> None:
    compressor = start()
    fade_(compressor, FILTERS, [1, 3])
    compressor.on_drop(lambda drop: answer)
    assert compressor.event_().dropped == {FILTERS: 1}


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (torch.tensor([1, 3]), r"value of type torch\.Tensor"),
        (np.array([1, 3]), r"value of type numpy\.ndarray"),
        ([torch.tensor(3)], r"list that contains a value of type torch\.Tensor"),
        ([False, True], "list that contains a value of type bool"),
        ("13", "value of type str"),
        (3, "value of type int"),
    ],
    ids=lambda value: str(value),
)
def test_an_answer_that_could_mean_several_things_is_refused(answer: Any, kind: str) -> None:
    compressor = start()
    fade_(compressor, FILTERS, [1, 3])

    @compressor.on_drop
    def confused(drop: Drop) -> Any:
        return answer

    with pytest.raises(TypeError, match=f"confused' returned a {kind}; return True, False"):
        compressor.event_()
    assert compressor.widths[FILTERS] == 5


def test_a_vetoed_index_is_the_one_that_stays() -> None:
    compressor = start(sinkhorn_sweeps=0, norm_rate=0, anchor=0)
    fade_(compressor, FILTERS, [1, 3])
    up = named_tensors(compressor.model)["operators.mlp_0.up"].detach().clone()
    compressor.on_drop(lambda drop: (3,))
    compressor.event_()
    left = named_tensors(compressor.model)["operators.mlp_0.up"]
    assert torch.equal(left, up[:, [0, 1, 2, 4]])


def test_a_later_hook_sees_what_earlier_ones_allowed() -> None:
    compressor = start()
    fade_(compressor, FILTERS, [1, 3])
    seen = []
    compressor.on_drop(lambda drop: (3,))
    compressor.on_drop(lambda drop: seen.append(drop.indices))
    compressor.event_()
    assert seen == [(3,)]


@pytest.mark.parametrize(
    ("multiple", "left"), [(1, 2), (2, 2), (3, 3), (4, 4), (5, 5)], ids=lambda number: str(number)
)
def test_widths_stay_multiples(multiple: int, left: int) -> None:
    """Of five filters three have faded."""
    compressor = start(multiple=multiple)
    fade_(compressor, FILTERS, [0, 1, 3])
    seen = []
    compressor.on_drop(lambda drop: seen.append((drop.axis, len(drop.indices))))
    event = compressor.event_()
    assert compressor.widths[FILTERS] == left
    assert event.spared == {}
    # Nobody is asked about what would stay anyway.
    assert seen == ([(FILTERS, 5 - left)] if left < 5 else [])


def test_a_veto_wins_and_the_rest_stays_with_it() -> None:
    compressor = start(multiple=2)
    fade_(compressor, FILTERS, [0, 1, 3])
    compressor.on_drop(lambda drop: drop.indices[:2])
    compressor.event_()
    assert compressor.widths[FILTERS] == 4


def test_what_is_held_back_for_the_guard_is_not_spared_by_it() -> None:
    """The batch misses one of three filters; one more stays to make the width even."""
    compressor = start(multiple=2)
    fade_(compressor, FILTERS, [0, 1, 3])
    up = named_tensors(compressor.model)["operators.mlp_0.up"]
    compressor.probe = lambda: float(not up[:, 1].any()) * 1e12
    event = compressor.event_()
    assert event.spared == {FILTERS: 1}
    assert event.dropped == {FILTERS: 1}


# --- record --------------------------------------------------------------------------


def test_an_event_is_on_record() -> None:
    compressor = start()
    fade_(compressor, FILTERS, [1])
    price, before = compressor.prices[FILTERS][1], compressor.fma
    event = compressor.event_()
    assert compressor.history == [event]
    assert event.dropped == {FILTERS: 1}
    assert event.prices == {FILTERS: price}
    assert (event.fma_before, event.fma) == (before, before - price)
    assert compressor.fma == before - price
    assert compressor.fma_initial == before
    assert event.widths == compressor.widths
    assert not event.refused
    json.dumps(event.to_dict())


def test_the_structure_is_the_surviving_one() -> None:
    compressor = start()
    fade_(compressor, FILTERS, [1])
    fade_(compressor, "D", [2])
    compressor.event_()
    again = TransformerSpec.from_dict(json.loads(json.dumps(compressor.structure)))
    assert again == compressor.model.spec()
    assert again.sites == (0, 1, 3, 4, 5)
    assert again.operators[1].filters == 4


def test_a_faded_operator_is_removed() -> None:
    compressor = start()
    fade_(compressor, FILTERS, list(range(5)))
    event = compressor.event_()
    assert event.removed == ("operators.mlp_0",)
    assert not any(name.startswith("operators.mlp_0") for name in compressor.widths)
    train(compressor, 2)


def test_the_last_key_stays_while_attention_does() -> None:
    compressor = start()
    fade_(compressor, "operators.attention_0.d_k", [0, 1, 2])
    assert compressor.event_().removed == ()
    assert compressor.widths["operators.attention_0.d_k"] == 1


@pytest.mark.parametrize(("norms", "left"), [(False, 6), (True, 5)])
def test_an_input_that_rules_its_normaliser_stays(norms: bool, left: int) -> None:
    compressor = start()
    fade_(compressor, "classifier.d_c", [2], norms=norms)
    compressor.event_()
    assert compressor.widths["classifier.d_c"] == left


def test_what_would_end_the_network_is_refused() -> None:
    compressor = start(trust=1e9)
    structure = compressor.structure
    event = compressor.event_()
    assert event.refused
    assert event.dropped == {}
    assert compressor.structure == structure


def test_balance_keeps_the_probed_loss() -> None:
    compressor = start(probe=lambda model: task_loss(model).item(), norm_rate=0, anchor=0)
    for parameter in compressor.model.parameters():
        parameter.data.mul_(torch.linspace(0.5, 2, parameter.numel()).view(parameter.shape))
    fade_(compressor, FILTERS, [1])
    event = compressor.event_()
    assert event.loss_balanced == pytest.approx(event.loss_before, rel=1e-10)
    assert event.loss_after == pytest.approx(event.loss_before, rel=1e-6)
    assert event.loss_after == task_loss(compressor.model).item()


# --- the order of things -------------------------------------------------------------


def test_events_come_at_the_interval() -> None:
    events = train(start(solver="fixed", rho=1e-6, interval=3), 7)
    assert [event is not None for event in events] == [False, False, True] * 2 + [False]


def test_no_event_without_pressure() -> None:
    assert train(start(target=-1.0, interval=1), 3) == [None] * 3


def test_pressure_counts_until_the_next_event() -> None:
    compressor = start(interval=2, solver="fixed", rho=1e-6)
    train(compressor, 1)
    compressor.scalars.pressure.fill_(0)
    assert train(compressor, 1) != [None]
    assert train(compressor, 2) == [None, None]
