"""Balance changes no output, on any axis of any model, and it does balance."""

import math

import pytest
import torch

from gaugelasso.axes import Axis, AxisTable, Slot, named_tensors, width
from gaugelasso.compress import gauge, reference
from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.flat_optimizer import StateVector
from gaugelasso.compress.gauge_factors import power_of_two
from gaugelasso.compress.groups import Groups
from gaugelasso.compress.optim import CoupledOptimizer
from tests.contract.models import (
    FIRST,
    WHOLE,
    Case,
    axis_names,
    difference,
    has_norms,
    imbalance,
    loss,
    make,
    output,
    table_of,
)
from tests.toys import Toy, exact, gaussian


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_rescaling_one_axis_changes_no_output(case: Case) -> None:
    before = output(make(case), case)
    free = [axis for axis in map(table_of(case).__getitem__, axis_names(case)) if axis.gauge]
    assert free
    for axis in free:
        model = make(case)
        tensors = named_tensors(model)
        generator = torch.Generator().manual_seed(case.seed)
        uniform = torch.rand(width(axis, tensors), generator=generator, dtype=torch.float64)
        reference.rescale_(axis, 10 ** (2 * uniform - 1), tensors)
        assert difference(output(model, case), before) < 1e-10, axis.name


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_balance_changes_no_output(case: Case) -> None:
    """By powers of two not in a single bit."""
    for rounded in (False, True):
        model = make(case)
        before = output(model, case)
        factors = reference.balance_(table_of(case), named_tensors(model), rounded=rounded)
        assert max(float(c.log().abs().max()) for c in factors.values()) > 0.1
        assert difference(output(model, case), before) < 1e-10
    assert torch.equal(output(model, case), before)


# To a thousandth it takes 30 sweeps, which one case of each row shows.
@pytest.mark.parametrize(
    ("case", "rounded", "sweeps", "bound"),
    [pytest.param(case, False, 30, 1e-3, id=f"{case}-exact") for case in FIRST if case.dropped]
    + [pytest.param(case, True, 6, math.log(2) + 1e-9, id=f"{case}-rounded") for case in FIRST],
)
def test_balance_balances(case: Case, rounded: bool, sweeps: int, bound: float) -> None:
    """Within so many sweeps: to a thousandth, or as near as powers of two come."""
    model = make(case)
    table, tensors = table_of(case), named_tensors(model)
    worst = math.inf
    for _ in range(3):
        reference.balance_(table, tensors, sweeps=sweeps // 3, rounded=rounded)
        worst = max(float(values.max()) for values in imbalance(table, tensors).values())
        if worst < bound:
            break
    assert worst < bound


def test_where_both_sides_would_round_up_one_of_them_does() -> None:
    """c = sqrt(2) is as near to 1 as to 2, and so is its inverse to 1 as to a half."""
    table = AxisTable(
        axes=(Axis("j", "j", (Slot("a"),), (Slot("b"),)),), fixed=(Slot("a", 1), Slot("b", 1))
    )
    model = Toy(table, a=torch.ones(3, 2), b=2 * torch.ones(3, 2))
    store = FlatStore(model, table)
    groups = Groups(table, named_tensors(model), store)
    factor = gauge.Balance(table, named_tensors(model), groups, rounded=True).sweep_(
        store.weight, []
    )
    span = groups.ranges["j"]
    assert torch.equal(factor[span.side("a")] * factor[span.side("b")], torch.ones(3))


def test_the_nearest_power_of_two() -> None:
    x = torch.logspace(-30, 30, 1001, dtype=torch.float64)
    near = power_of_two(x)
    assert torch.equal(near.log2(), near.log2().round())
    assert bool(((near / x).log2().abs() <= 0.5 + 1e-12).all())


@pytest.mark.parametrize("case", [case for case in WHOLE if has_norms(case)], ids=str)
def test_an_anchor_changes_no_output(case: Case) -> None:
    """A normaliser with an eps is left alone: its level cannot be changed exactly."""
    model = make(case)
    table, tensors = table_of(case), named_tensors(model)
    state = {norm.gain: torch.ones_like(tensors[norm.gain]) for norm in table.norms}
    before, gains = output(model, case), {name: tensors[name].clone() for name in state}
    for norm in table.norms:
        tensors[norm.energy].copy_(torch.rand(tensors[norm.energy].shape) + 0.5)
        reference.anchor_(norm, tensors, state, {}, 0.1)
        assert torch.equal(tensors[norm.gain], gains[norm.gain]) is (
            norm.has_eps or not norm.follows
        )
    assert difference(output(model, case), before) < 1e-10


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_each_sweep_is_clipped(case: Case) -> None:
    model = make(case)
    tensors = named_tensors(model)
    axis = table_of(case).axes[0]
    reference.rescale_(axis, torch.full((width(axis, tensors),), 1e6).double(), tensors)
    factors = reference.balance_(table_of(case), tensors, sweeps=2, clip=8.0)
    assert torch.equal(factors[axis.name], torch.full_like(factors[axis.name], 1 / 64))


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_gradient_follows_balance_as_momentum_does(case: Case) -> None:
    model = make(case)
    tensors = named_tensors(model)
    loss(model, case).backward()
    momentum = {name: p.grad.clone() for name, p in model.named_parameters()}
    second = {name: gradient.square() for name, gradient in momentum.items()}
    factors = reference.balance_(table_of(case), tensors)
    for name, factor in factors.items():
        reference.rescale_state_(table_of(case)[name], factor, tensors, momentum, second)
    model.zero_grad()
    loss(model, case).backward()
    for name, parameter in model.named_parameters():
        assert difference(momentum[name], parameter.grad) < 1e-9
        assert difference(second[name], parameter.grad.square()) < 1e-9


@pytest.mark.parametrize("case", [case for case in WHOLE if has_norms(case)], ids=str)
def test_energy_follows_the_stream(case: Case) -> None:
    """The stored input energy is the rescaled stream's own, so the slow norm stays informed."""
    model = make(case).train()
    output(model, case)
    table, tensors = model.axis_table(), named_tensors(model)
    reference.balance_(table, tensors)
    followed = {norm.energy: tensors[norm.energy].clone() for norm in table.norms}
    output(model, case)
    for name, energy in followed.items():
        assert difference(energy, tensors[name]) < 1e-10


@pytest.mark.parametrize("dead", ["side_a", "side_b"])
def test_an_index_with_a_zero_side_is_left_alone(dead: str) -> None:
    model = make(WHOLE[0])
    tensors, axis = named_tensors(model), model.axis_table().axes[0]
    for slot in getattr(axis, dead):
        tensors[slot.tensor].detach().select(slot.dim, 0).zero_()
    factors = reference.balance_(model.axis_table(), tensors)
    assert factors[axis.name][0] == 1
    assert all(math.isfinite(value) for c in factors.values() for value in c.tolist())


@pytest.mark.parametrize(
    ("case", "clip", "rounded"),
    [(case, 10.0, False) for case in WHOLE] + [(case, 2.5, True) for case in WHOLE if case.dropped],
    ids=str,
)
def test_flat_sweeps_and_anchors_are_those_of_one_axis_after_another(
    case: Case, clip: float, rounded: bool
) -> None:
    one, flat = make(case), make(case)
    table, tensors = table_of(case), named_tensors(one)
    optimizer = CoupledOptimizer(FlatStore(flat, table), table.matrices)
    generator = torch.Generator().manual_seed(case.seed)
    for state in (optimizer.momentum, optimizer.second):
        state.copy_(torch.rand(state.shape, generator=generator))
    states = optimizer.states()
    momentum, second = (
        {name: view.clone() for name, view in states[kind].items()} for kind in states
    )
    store, views = optimizer.store, named_tensors(flat)
    groups = Groups(table, views, store)
    balance = gauge.Balance(table, views, groups, rounded)
    slow = gauge.SlowNorms(table.norms, views, rounded)
    # As a run gives it, a scalar on the device, and as a number.
    for least in (exact(0.8), exact(1.0), 0.0):
        factors = reference.balance_(table, tensors, 1, clip, rounded)
        for name, factor in factors.items():
            reference.rescale_state_(table[name], factor, tensors, momentum, second)
        for norm in table.norms:
            reference.anchor_(norm, tensors, momentum, second, 0.1, rounded, least)
        mine = balance.sweep_(store.weight, optimizer.state, clip)
        slow.anchor_([(-1, states["momentum"]), (-2, states["second"])], 0.1, least)
        for name, factor in factors.items():
            assert difference(mine[groups.ranges[name].side("a")], factor) < 1e-12
    for expected, got in (
        (tensors, named_tensors(flat)),
        (momentum, states["momentum"]),
        (second, states["second"]),
    ):
        assert expected.keys() == got.keys()
        for name, tensor in expected.items():
            assert difference(got[name].double(), tensor.double()) < 1e-12, name


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_a_flat_sweep_is_a_rescale_of_every_axis(case: Case) -> None:
    """The factors that a sweep returns, applied one axis at a time, give the same tensors."""
    one, flat = make(case), make(case)
    table, tensors = table_of(case), named_tensors(one)
    store = FlatStore(flat, table)
    groups = Groups(table, named_tensors(flat), store)
    balance = gauge.Balance(table, named_tensors(flat), groups)
    factor = balance.sweep_(store.weight, [])
    for axis in table.axes:
        own = factor[groups.ranges[axis.name].side("a")]
        if axis.gauge:
            reference.rescale_(axis, own, tensors)
        else:
            assert torch.equal(own, torch.ones_like(own))
    for name, tensor in named_tensors(flat).items():
        assert difference(tensor.double(), tensors[name].double()) < 1e-12, name


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("case", [case for case in WHOLE if has_norms(case)], ids=str)
def test_slow_weights_of_all_normalisers_follow_as_each_would(case: Case, rate: float) -> None:
    one, flat = make(case), make(case)
    table, tensors = table_of(case), named_tensors(one)
    tensors[table.norms[0].gain].detach().zero_()
    named_tensors(flat)[table.norms[0].gain].detach().zero_()
    for norm in table.norms:
        reference.follow_(norm, tensors, rate)
    gauge.SlowNorms(table.norms, named_tensors(flat)).follow_(exact(rate))
    for norm in table.norms:
        followed = named_tensors(flat)[norm.weight]
        assert difference(followed, tensors[norm.weight]) < 1e-12, norm.weight


def test_trained_riders_follow_a_flat_sweep() -> None:
    """Also one that another axis penalises later in the same sweep."""
    table = AxisTable(
        axes=(
            Axis(
                "j", "j", (Slot("a"),), (Slot("b"),), (Slot("c", 1, power=2), Slot("d", power=-1))
            ),
            Axis("k", "k", (Slot("c"),), (Slot("e"),)),
        ),
        fixed=(Slot("a", 1), Slot("b", 1), Slot("e", 1)),
    )
    shapes = {"a": (3, 4), "b": (3, 2), "c": (5, 3), "d": (3,), "e": (5, 4)}
    made = {name: gaussian(*shape, seed=k) for k, (name, shape) in enumerate(shapes.items())}
    one, flat = (Toy(table, **made) for _ in range(2))
    table.check(named_tensors(one))
    store = FlatStore(flat, table)
    views, tensors = named_tensors(flat), named_tensors(one)
    state = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    second = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    for name, factor in reference.balance_(table, tensors, 1).items():
        reference.rescale_state_(table[name], factor, tensors, state, second)
    momentum, squares = torch.ones_like(store.weight), torch.ones_like(store.weight)
    balance = gauge.Balance(table, views, Groups(table, views, store))
    vectors = [StateVector("momentum", momentum, -1), StateVector("second", squares, -2)]
    balance.sweep_(store.weight, vectors)
    for name in shapes:
        assert difference(views[name], tensors[name]) < 1e-12
        assert difference(store.views(momentum)[name], state[name]) < 1e-12
        assert difference(store.views(squares)[name], second[name]) < 1e-12


@pytest.mark.parametrize("dead", ["side_a", "side_b"])
def test_a_flat_sweep_leaves_an_index_with_a_zero_side_alone(dead: str) -> None:
    model = make(WHOLE[0])
    table = model.axis_table()
    store = FlatStore(model, table)
    tensors, axis = named_tensors(model), table.axes[0]
    for slot in getattr(axis, dead):
        tensors[slot.tensor].detach().select(slot.dim, 0).zero_()
    groups = Groups(table, tensors, store)
    factor = gauge.Balance(table, tensors, groups).sweep_(store.weight, [])
    assert factor[groups.ranges[axis.name].side("a")][0] == 1
    assert bool(factor.isfinite().all())
