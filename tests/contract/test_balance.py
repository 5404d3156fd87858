"""Balance changes no output, on any axis of any model, and it does balance."""

import math

import pytest
import torch

from gaugelasso import gauge
from gaugelasso.axes import named_tensors, width
from tests.contract.models import AXES, CASES, SEEDS, Case, difference, loss, make, output
from tests.toys import exact


@pytest.mark.parametrize(("case", "name"), AXES)
def test_rescaling_one_axis_changes_no_output(case: Case, name: str) -> None:
    model = make(case)
    tensors, axis = named_tensors(model), model.axis_table()[name]
    before = output(model, case)
    generator = torch.Generator().manual_seed(case.seed)
    uniform = torch.rand(width(axis, tensors), generator=generator, dtype=torch.float64)
    gauge.rescale_(axis, 10 ** (2 * uniform - 1), tensors)
    assert difference(output(model, case), before) < 1e-10


@pytest.mark.parametrize("case", CASES, ids=str)
def test_balance_changes_no_output(case: Case) -> None:
    model = make(case)
    before = output(model, case)
    factors = gauge.balance_(model.axis_table(), named_tensors(model))
    assert max(float(c.log().abs().max()) for c in factors.values()) > 0.1
    assert difference(output(model, case), before) < 1e-10


@pytest.mark.parametrize("case", CASES[:: len(SEEDS)], ids=str)
def test_balance_balances(case: Case) -> None:
    model = make(case)
    table, tensors = model.axis_table(), named_tensors(model)
    gauge.balance_(table, tensors, sweeps=40)
    worst = max(float(values.max()) for values in gauge.imbalance(table, tensors).values())
    assert worst < 1e-3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_sweep_is_clipped(case: Case) -> None:
    model = make(case)
    tensors = named_tensors(model)
    axis = model.axis_table().axes[0]
    gauge.rescale_(axis, torch.full((width(axis, tensors),), 1e6).double(), tensors)
    factors = gauge.balance_(model.axis_table(), tensors, sweeps=2, clip=10.0)
    assert torch.allclose(factors[axis.name], exact(1e-2))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_follows_balance_as_momentum_does(case: Case) -> None:
    model = make(case)
    tensors = named_tensors(model)
    loss(model, case).backward()
    momentum = {name: p.grad.clone() for name, p in model.named_parameters()}
    second = {name: gradient.square() for name, gradient in momentum.items()}
    factors = gauge.balance_(model.axis_table(), tensors)
    for name, factor in factors.items():
        gauge.rescale_state_(model.axis_table()[name], factor, tensors, momentum, second)
    model.zero_grad()
    loss(model, case).backward()
    for name, parameter in model.named_parameters():
        assert difference(momentum[name], parameter.grad) < 1e-9
        assert difference(second[name], parameter.grad.square()) < 1e-9


@pytest.mark.parametrize("case", CASES, ids=str)
def test_energy_follows_the_stream(case: Case) -> None:
    """The stored input energy is the rescaled stream's own, so the slow norm stays informed."""
    model = make(case).train()
    output(model, case)
    table, tensors = model.axis_table(), named_tensors(model)
    gauge.balance_(table, tensors)
    followed = {norm.energy: tensors[norm.energy].clone() for norm in table.norms}
    output(model, case)
    for name, energy in followed.items():
        assert difference(energy, tensors[name]) < 1e-10


@pytest.mark.parametrize("dead", ["side_a", "side_b"])
def test_an_index_with_a_zero_side_is_left_alone(dead: str) -> None:
    model = make(CASES[0])
    tensors, axis = named_tensors(model), model.axis_table().axes[0]
    for slot in getattr(axis, dead):
        tensors[slot.tensor].detach().select(slot.dim, 0).zero_()
    factors = gauge.balance_(model.axis_table(), tensors)
    assert factors[axis.name][0] == 1
    assert all(math.isfinite(value) for c in factors.values() for value in c.tolist())
