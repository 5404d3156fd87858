"""Growth: no axis changes the function when it grows, and what is new can learn and can go."""

import functools
import json
import math

import pytest
import torch
from torch import Tensor

from gaugelasso.axes import Axis, Compressible, Tensors, named_tensors, width
from gaugelasso.compress import growth, reference
from gaugelasso.compress.drop import cascade
from gaugelasso.compress.surgery import cut_, swap_
from tests.contract.models import (
    FIRST,
    TRANSFORMERS,
    Case,
    axis_names,
    clone,
    difference,
    loss,
    made,
    make,
    output,
    silence_,
    table_of,
)

SEED = 3


@functools.cache
def growing(case: Case) -> list[str]:
    """Axes with room.

    The table of the perceptron does not say how it grows, and an operator that reads and writes
    all sites can name no further one.
    """
    table, tensors = table_of(case), named_tensors(make(case))
    return [name for name in axis_names(case) if growth.room(table, table[name], tensors)]


def linear(case: Case) -> list[str]:
    return [name for name in growing(case) if table_of(case)[name].growth == "linear"]


GROWING = [case for case in FIRST if growing(case)]
LINEAR = [case for case in FIRST if linear(case)]


def grown(
    case: Case, model: Compressible, name: str, number: int = 2, states: tuple = ()
) -> tuple[Compressible, growth.Grown]:
    """A copy of the case's model with some more indices on one axis, as far as there is room.

    It shares the tensors that do not grow.
    """
    table, tensors = table_of(case), named_tensors(model)
    number = int(min(number, growth.room(table, table[name], tensors)))
    result = growth.grow(
        tensors, table, {name: number}, torch.Generator().manual_seed(SEED), states
    )
    larger = clone(model, share_tensors=True)
    swap_(larger, result.tensors)
    added = growth.grown_widths(table, {name: number})
    before, after = table.widths(tensors), larger.axis_table().widths(named_tensors(larger))
    assert after == {each: size + added.get(each, 0) for each, size in before.items()}
    return larger, result


@functools.cache
def grown_by_two(case: Case, name: str) -> Compressible:
    """The case's model with two more indices on one axis, which nothing may change."""
    return grown(case, made(case), name)[0]


@pytest.mark.parametrize("case", GROWING, ids=str)
def test_growth_changes_no_output(case: Case) -> None:
    model = make(case)
    before = output(model, case)
    for name in growing(case):
        larger = grown_by_two(case, name)
        larger.axis_table().check(named_tensors(larger))
        after = output(larger, case)
        assert difference(after, before) < 1e-10, name
        again = case.row.rebuild(json.loads(json.dumps(larger.structure()))).double().eval()
        again.load_state_dict(larger.state_dict())
        assert torch.equal(output(again, case), after), name


@pytest.mark.parametrize("case", GROWING, ids=str)
def test_new_indices_have_norms_of_a_typical_size(case: Case) -> None:
    """On both sides of a linear axis, on one side of every other; the other side is zero."""
    model = make(case)
    for name in growing(case):
        larger, _ = grown(case, model, name, number=3)
        _check_norms(table_of(case)[name], _norms(model, name), _norms(larger, name))


def _check_norms(axis: Axis, old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    size = len(old["a"])
    fresh = {side: norms[size:] for side, norms in new.items()}
    typical = {side: float(norms.square().mean().sqrt()) for side, norms in old.items()}
    if axis.growth == "linear":
        for side, norms in fresh.items():
            assert bool((norms > 0).all()), axis.name
            assert float(norms.max()) < math.sqrt(size) * typical[side], axis.name
        return
    silent = "b" if axis.linked() or not axis.gauge else "a"
    other = "a" if silent == "b" else "b"
    assert not fresh[silent].any(), axis.name
    assert bool((fresh[other] > 0.1 * typical[other]).all()), axis.name
    assert bool((fresh[other] < 10 * typical[other]).all()), axis.name


def _norms(model: Compressible, name: str) -> dict[str, Tensor]:
    axis, tensors = model.axis_table()[name], named_tensors(model)
    return {
        side: reference.side_norms(axis, slots, tensors).detach() for side, slots in axis.sides()
    }


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_a_gradient_of_the_grown_model_is_the_transformed_gradient(case: Case) -> None:
    """So momentum, an average of gradients, follows as the weights do."""
    model = make(case)
    gradients = _gradients(model, case)
    for name in linear(case):
        larger, result = grown(case, model, name, states=((-1, gradients),))
        expected, found = _gradients(larger, case), result.states[0]
        scale = max(float(each.abs().max()) for each in expected.values())
        for tensor, gradient in expected.items():
            deviation = float((found[tensor] - gradient).abs().max())
            assert deviation < 1e-10 * scale, (name, tensor)


@pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(case, name, id=f"{case}-{name}") for case in LINEAR for name in linear(case)],
)
def test_a_linear_axis_grows_as_the_reference_says(case: Case, name: str) -> None:
    model = make(case)
    axis, tensors = table_of(case)[name], named_tensors(model)
    momentum = {slot.tensor: tensors[slot.tensor].sin() for slot in axis.side_a + axis.side_b}
    second = {tensor: values.square() for tensor, values in momentum.items()}
    seeded = torch.Generator().manual_seed
    states = (-1, momentum), (-2, second)
    result = growth.grow(tensors, table_of(case), {name: 2}, seeded(SEED), states)
    q = growth.procrustes_map(width(axis, tensors), 2, seeded(SEED))
    wanted = {
        power: reference.procrustes_rows(axis, q, given, power)
        for power, given in ((1, tensors), (-1, momentum), (-2, second))
    }
    for power, found in zip((1, -1, -2), (result.tensors, *result.states), strict=True):
        for tensor, expected in wanted[power].items():
            assert torch.allclose(found[tensor], expected, rtol=1e-12, atol=1e-14), tensor
    # Squares stay squares, and none is lost.
    for tensor, old in second.items():
        assert bool((result.states[1][tensor] >= 0).all())
        assert torch.allclose(result.states[1][tensor].sum(), old.sum())


def _gradients(model: Compressible, case: Case) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss(model, case), list(named.values()), allow_unused=True)
    pairs = zip(named, found, strict=True)
    return {name: torch.zeros_like(named[name]) if g is None else g for name, g in pairs}


@pytest.mark.parametrize("case", [case for case in GROWING if not case.dropped], ids=str)
def test_a_silent_index_can_learn(case: Case) -> None:
    """The zero side has a gradient; a zero on both sides would be there forever."""
    model = make(case)
    for name in growing(case):
        larger = grown_by_two(case, name)
        axis, tensors, gradients = table_of(case)[name], named_tensors(larger), None
        fresh = _fresh(axis, tensors, width(axis, named_tensors(model)))
        for side, slots in axis.sides():
            own = [tensors[slot.tensor].movedim(slot.dim, 0)[fresh[slot]] for slot in slots]
            if any(bool(each.any()) for each in own):
                continue
            gradients = gradients or _gradients(larger, case)
            parts = [gradients[slot.tensor].movedim(slot.dim, 0)[fresh[slot]] for slot in slots]
            assert sum(float(part.norm()) for part in parts) > 0, (name, side)


def _fresh(axis: Axis, tensors: Tensors, size: int) -> dict:
    """Slot -> the positions of indices from `size` on."""
    found = {}
    for slot in axis.side_a + axis.side_b:
        index = torch.arange(tensors[slot.tensor].shape[slot.dim])
        found[slot] = (index if slot.link is None else tensors[slot.link]) >= size
    return found


@pytest.mark.parametrize("case", GROWING, ids=str)
def test_new_indices_can_be_cut_again(case: Case) -> None:
    """Zero-then-drop of what was born gives the model before the birth, to the last bit."""
    model = make(case)
    born, old = output(model, case), named_tensors(model)
    for name in [each for each in growing(case) if each not in linear(case)]:
        larger = clone(grown_by_two(case, name))  # which is silenced in place
        table, tensors = larger.axis_table(), named_tensors(larger)
        keeps = {each: torch.ones(n, dtype=torch.bool) for each, n in table.widths(tensors).items()}
        keeps[name][width(table_of(case)[name], old) :] = False
        before = output(larger, case)
        silence_(larger, {name: keeps[name]}, table)
        assert difference(output(larger, case), before) < 1e-10, name
        decision = cascade(table, tensors, keeps)
        assert decision is not None
        cut_(larger, table, decision.keeps, decision.removed)
        if not case.dropped:  # else the cascade has more to do
            after = named_tensors(larger)
            assert all(torch.equal(after[key], tensor) for key, tensor in old.items()), name
        assert difference(output(larger, case), born) < 1e-10, name


@pytest.mark.parametrize("case", TRANSFORMERS[:2], ids=str)
def test_several_axes_grow_at_once_and_a_seed_repeats_them(case: Case) -> None:
    model = make(case)
    table, tensors = model.axis_table(), named_tensors(model)
    births = {a.name: 1 for a in table.axes if a.kind in ("d_k", "d_v", "d_f", "D")}
    first, again, other = (
        growth.grow(tensors, table, births, torch.Generator().manual_seed(seed)).tensors
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    before = output(model, case)
    swap_(model, first)
    assert difference(output(model, case), before) < 1e-10
