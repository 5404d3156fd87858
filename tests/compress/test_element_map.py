"""Large models store no number of an element: their results are those of small ones."""

from typing import Any

import pytest
import torch

from gaugelasso.axes import named_tensors
from gaugelasso.compress import element_map, pricing
from gaugelasso.compress.element_map import ElementMap
from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.flat_optimizer import StateVector
from gaugelasso.compress.gauge import Balance
from gaugelasso.compress.groups import Groups, weighed_with_riders
from gaugelasso.compress.penalty import Penalty
from tests.contract.models import WHOLE, Case, make
from tests.test_golden import CURVES, curve
from tests.toys import exact, gaussian, pairs


def results(case: Case) -> dict[str, torch.Tensor]:
    """All that depends on the groups of elements."""
    model = make(case)
    table = model.axis_table()
    store = FlatStore(model, table)
    tensors, weight = named_tensors(model), store.weight
    prices = pricing.prices(table, pricing.ACCOUNTINGS["fma"], tensors)
    penalty = Penalty(table, tensors, store, prices)
    norms, groups = penalty.norms(weight), penalty.groups
    found = {f"wave {k}": groups.sums(weight, k) for k in range(len(groups.waves))}
    found |= {
        "sums": groups.sums(weight),
        "norms": norms,
        "gradient": penalty.gradient(weight, norms),
        "rates": penalty.bounded_rate(norms, exact(0.01), 0.1, store.matrix_end),
        "counts": groups.counts,
    }
    weighed = weighed_with_riders(table, tensors)
    groups = groups if weighed is table else Groups(weighed, tensors, store)
    state = StateVector("momentum", gaussian(len(store), seed=1), power=-1)
    found["factors"] = Balance(weighed, tensors, groups).sweep_(weight, [state])
    return found | {"weight": weight, "state": state.values, **dict(model.named_buffers())}


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_both_forms_agree(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = results(case)
    monkeypatch.setattr(element_map, "MOST_STORED", 0)
    for name, value in results(case).items():
        assert value.shape == stored[name].shape
        assert torch.allclose(value, stored[name], rtol=1e-12, atol=1e-14), name


def test_an_element_without_entries_has_that_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pairs((2, 3, 1))
    store = FlatStore(model, model.declared)
    values = torch.tensor([2.0, 5.0, 7.0])
    for most in (2**26, 0):
        monkeypatch.setattr(element_map, "MOST_STORED", most)
        nowhere = ElementMap(store, [], named_tensors(model), none=1)
        assert nowhere.stored == bool(most)
        assert nowhere.combined(values, "sum").tolist() == [5.0] * len(store)


def test_a_run_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty steps, with cuts."""
    expected: Any = curve(**CURVES["muon"])
    monkeypatch.setattr(element_map, "MOST_STORED", 0)
    found: Any = curve(**CURVES["muon"])
    assert found["structure"] == expected["structure"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
