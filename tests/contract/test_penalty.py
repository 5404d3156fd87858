"""The penalty on flat storage equals the penalty slice by slice."""

import math

import pytest
import torch

from gaugelasso.axes import Axis, Slot, Tensors, named_tensors, width
from gaugelasso.compress import reference
from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.penalty import Penalty
from gaugelasso.compress.pricing import ACCOUNTINGS, prices
from tests.contract.models import WHOLE, Case, difference, make


def slices(axis: Axis, slots: tuple[Slot, ...], tensors: Tensors) -> list[list[torch.Tensor]]:
    """For each index of an axis: its parts of every tensor on one side."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(width(axis, tensors))]
    for slot in slots:
        rows = tensors[slot.tensor].detach().movedim(slot.dim, 0)
        owners = tensors[slot.link].tolist() if slot.link else range(len(rows))
        for row, owner in zip(rows, owners, strict=True):
            parts[owner].append(row)
    return parts


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_norms_and_strengths_are_those_of_the_slices(case: Case) -> None:
    model = make(case)
    table = model.axis_table()
    price = prices(table, ACCOUNTINGS["fma"], named_tensors(model))
    store = FlatStore(model, table)
    penalty = Penalty(table, named_tensors(model), store, price)
    norms = penalty.norms(store.weight)
    for axis in table.axes:
        for side, slots in axis.sides():
            span = penalty.ranges[axis.name].side(side)
            tensors = named_tensors(model)
            expected = reference.side_norms(axis, slots, tensors).detach()
            assert torch.allclose(norms[span], expected, rtol=1e-12)
            expected = reference.side_strengths(axis, side, tensors, price[axis.name], "efficiency")
            assert torch.allclose(penalty.strength[span], expected, rtol=1e-12)
            for j, parts in enumerate(slices(axis, slots, named_tensors(model))):
                square = sum(float(part.square().sum()) for part in parts)
                count = sum(part.numel() for part in parts)
                strength = price[axis.name][j] / math.sqrt(count)
                assert norms[span][j].item() == pytest.approx(math.sqrt(square), rel=1e-12)
                assert penalty.strength[span][j].item() == pytest.approx(strength, rel=1e-12)


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_gradient_is_that_of_the_summed_norms(case: Case) -> None:
    model = make(case)
    table, tensors = model.axis_table(), named_tensors(model)
    price = prices(table, ACCOUNTINGS["fma"], tensors)
    reference.penalty_value(table, tensors, price).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    store = FlatStore(model, table)
    penalty = Penalty(table, named_tensors(model), store, price)
    for name, gradient in store.views(penalty.gradient(store.weight)).items():
        if expected[name] is None:
            assert gradient.count_nonzero() == 0, name
        else:
            assert difference(gradient, expected[name]) < 1e-12, name
