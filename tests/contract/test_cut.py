"""Cutting: zero-then-drop equals drop, savings are as predicted, state and spec follow."""

import json

import pytest
import torch

from gaugelasso.axes import AxisTable, Compressible, Tensors, named_tensors, width
from gaugelasso.compress import pricing
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.compress.drop import Decision, cascade, close_and_round, grains
from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.memory import Memory
from gaugelasso.compress.optim import CoupledOptimizer
from gaugelasso.compress.surgery import cut_, kept_elements, snapshot_modules
from tests.contract.models import (
    FIRST,
    WHOLE,
    Case,
    axis_names,
    difference,
    is_linked,
    make,
    output,
    random_decision,
    silence_,
    sliced,
    table_of,
)
from tests.toys import exact

WAYS: list[pricing.CostModel] = [*pricing.ACCOUNTINGS.values(), Memory(batch=3)]


def all_kept(table: AxisTable, tensors: Tensors) -> dict[str, torch.Tensor]:
    return {a.name: torch.ones(width(a, tensors), dtype=torch.bool) for a in table.axes}


def random_loss_on(case: Case, tensors: Tensors, name: str) -> Decision:
    """Some, never all, indices of one axis go, and what the cascade takes along."""
    table, generator = table_of(case), torch.Generator().manual_seed(case.seed)
    while True:
        keeps = all_kept(table, tensors)
        keeps[name] = torch.rand(len(keeps[name]), generator=generator) > 0.4
        decision = cascade(table, tensors, keeps)
        if decision and keeps[name].any() and not keeps[name].all():
            return decision


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_dropping_zeroed_indices_of_one_axis_changes_no_output(case: Case) -> None:
    table = table_of(case)
    for name in axis_names(case):
        model = make(case)
        old_width = width(table[name], named_tensors(model))
        decision = random_loss_on(case, named_tensors(model), name)
        silence_(model, {name: decision.keeps[name]}, table)
        before = output(model, case)
        cut_(model, table, decision.keeps, decision.removed)
        left = model.axis_table().widths(named_tensors(model)).get(name, 0)
        assert left == int(decision.keeps[name].sum()) < old_width, name
        assert difference(output(model, case), before) < 1e-10, name


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_dropping_zeroed_indices_of_all_axes_changes_no_output(case: Case) -> None:
    model = make(case)
    decision = random_decision(model, torch.Generator().manual_seed(5), removed=1)
    silence_(model, decision.keeps)
    before = output(model, case)
    cut_(model, model.axis_table(), decision.keeps, decision.removed)
    assert difference(output(model, case), before) < 1e-10


@pytest.mark.parametrize(
    ("case", "multiple"),
    [(case, 2) for case in WHOLE] + [(case, n) for case in WHOLE if case.dropped for n in (1, 4)],
    ids=str,
)
def test_widths_go_down_in_multiples(case: Case, multiple: int) -> None:
    """Or stay, or become zero; and what is left can be cut, run and compressed further."""
    model = make(case)
    table, tensors = table_of(case), named_tensors(model)
    generator = torch.Generator().manual_seed(case.seed)
    while True:
        rms = {
            name: torch.rand(n, generator=generator) for name, n in table.widths(tensors).items()
        }
        keeps = {name: values > 0.6 for name, values in rms.items()}
        if decision := close_and_round(table, tensors, keeps, rms, multiple):
            break
    least = cascade(table, tensors, keeps)
    assert least is not None
    assert decision.removed == least.removed
    grain = grains(table, multiple)
    for name, keep in decision.keeps.items():
        assert bool((keep | ~least.keeps[name]).all())
        assert keep.all() or int(keep.sum()) % grain[name] == 0, name
        if multiple == 1:
            assert torch.equal(keep, least.keeps[name])
    cut_(model, table, decision.keeps, decision.removed)
    model.axis_table().check(named_tensors(model))
    assert output(model, case).isfinite().all()
    compressor = Compressor(model, 1e9, CompressorOptions(multiple=multiple))
    compressor.event_()
    assert compressor.resume_state.finite()


def operator_axes(case: Case) -> list[str]:
    """Axes of operators that may vanish. At birth the second layer is like the first."""
    table = table_of(case)
    return [
        name
        for owner, names in table.owners().items()
        if owner not in table.required and not owner.endswith("_1")
        for name in names
    ]


@pytest.mark.parametrize(
    "case", [case for case in FIRST if not case.dropped and operator_axes(case)], ids=str
)
def test_removing_a_silenced_operator_changes_no_output(case: Case) -> None:
    """Where the table says that an empty axis silences its owner, and only there."""
    table = table_of(case)
    for name in operator_axes(case):
        model = make(case)
        tensors = named_tensors(model)
        keeps = all_kept(table, tensors)
        keeps[name].zero_()
        decision = cascade(table, tensors, keeps)
        assert decision is not None
        assert decision.removed == (table[name].owner,)
        silence_(model, {name: keeps[name]}, table)
        before = output(model, case)
        cut_(model, table, decision.keeps, decision.removed)
        assert (difference(output(model, case), before) < 1e-10) == table[name].silences, name


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_predicted_saving_is_the_counted_one(case: Case) -> None:
    model, table = make(case), table_of(case)
    tensors, before = named_tensors(model), _work(model)
    widths = table.widths(tensors)
    predicted = {way: pricing.prices(table, way, tensors) for way in before}
    # The indices of an axis are all alike, but for sites after drops: not all of them are read and
    # written equally often.
    indices = [
        (name, index)
        for name in axis_names(case)
        for index in range(widths[name])
        if index in (0, widths[name] - 1) or (case.dropped and table[name].linked())
    ]
    for name, index in indices:
        # A site takes its positions along; anything more is the cascade's own saving.
        keeps = all_kept(table, tensors)
        keeps[name][index] = False
        for slot in table[name].linked():
            keeps[table.home(slot)] &= (tensors[slot.link] != index).cpu()
        decision = cascade(table, tensors, keeps)
        assert decision is not None
        alone = closed = _work_after(model, table, keeps)
        if decision.removed or any(not keep.equal(keeps[n]) for n, keep in decision.keeps.items()):
            closed = _work_after(model, table, decision.keeps, decision.removed)
        for way in before:
            saving = predicted[way][name][index]
            assert before[way] - alone[way] == saving, (name, index)
            assert before[way] - closed[way] >= saving, (name, index)


def _work_after(
    model: Compressible,
    table: AxisTable,
    keeps: dict[str, torch.Tensor],
    removed: tuple[str, ...] = (),
) -> dict[pricing.CostModel, float]:
    """The work of the model, whose table this is, with these keep-sets applied."""
    # A cut replaces tensors and writes into none, so it can be undone without a copy of them.
    restore = snapshot_modules(model)
    cut_(model, table, keeps, removed)
    work = _work(model)
    restore()
    return work


def _work(model: Compressible) -> dict[pricing.CostModel, float]:
    table, tensors = model.axis_table(), named_tensors(model)
    return {way: pricing.total_fma(table, way, tensors) for way in WAYS}


def trained(case: Case, kind: str = "adam") -> tuple[Compressible, CoupledOptimizer]:
    """A model some steps into training, with full momentum and second moments."""
    model = make(case)
    table = model.axis_table()
    optimizer = CoupledOptimizer(
        FlatStore(model, table), table.matrices, kind=kind, weight_decay=0.1
    )
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        store = optimizer.store
        store.grad.normal_(generator=generator)
        advance(optimizer, store.grad.clone(), torch.zeros_like(store.weight))
    return model, optimizer


@torch.no_grad()
def advance(optimizer: CoupledOptimizer, gradient: torch.Tensor, pressure: torch.Tensor) -> None:
    optimizer.store.grad.copy_(gradient)
    optimizer.observe_(torch.tensor(True))
    optimizer.step_(pressure, exact(1.0), exact(1e-2))


def operate(model: Compressible, optimizer: CoupledOptimizer, decision: Decision) -> torch.Tensor:
    """Cut model and optimizer; returns the flat positions kept."""
    table = model.axis_table()
    cut_(model, table, decision.keeps, decision.removed)
    alive = {name for name, _ in model.named_parameters()}
    kept = kept_elements(optimizer.store, table, decision.keeps, alive)
    optimizer.follow_cut_(kept)
    optimizer.attach(FlatStore(model, model.axis_table()), model.axis_table().matrices)
    return kept


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_surgery_and_an_elementwise_step_commute(case: Case) -> None:
    generator = torch.Generator().manual_seed(4)
    (model, early), (other_model, late) = trained(case), trained(case)
    decision = random_decision(model, generator, removed=1)
    size = len(early.store)
    gradient, pressure = torch.randn(2, size, generator=generator, dtype=torch.float64)

    kept = operate(model, early, decision)
    advance(early, gradient[kept], pressure[kept])
    advance(late, gradient, pressure)
    operate(other_model, late, decision)

    assert len(early.store) < size
    assert torch.equal(early.store.weight, late.store.weight)
    assert torch.equal(early.momentum, late.momentum)
    assert torch.equal(early.second, late.second)


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, "adam") for case in WHOLE] + [(case, "muon") for case in WHOLE if case.dropped],
    ids=str,
)
def test_weights_and_state_are_slices_of_the_old(case: Case, kind: str) -> None:
    model, optimizer = trained(case, kind)
    table = model.axis_table()
    decision = random_decision(model, torch.Generator().manual_seed(4), removed=1)
    old = {"weight": named_tensors(model), **optimizer.states()}
    old = {what: {n: t.detach().clone() for n, t in ts.items()} for what, ts in old.items()}
    operate(model, optimizer, decision)
    new = {"weight": dict(model.named_parameters()), **optimizer.states()}
    for what, tensors in new.items():
        assert tensors.keys() == old[what].keys() & dict(model.named_parameters()).keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, sliced(old[what][name], name, table, decision.keeps))


@pytest.mark.parametrize("case", list(filter(is_linked, WHOLE)), ids=str)
def test_sites_keep_their_names_through_a_cut(case: Case) -> None:
    """A position that survives stands at the site it stood at, by the number at birth."""
    model = make(case)
    table, tensors = model.axis_table(), named_tensors(model)
    (stream,) = (axis for axis in table.axes if axis.linked())
    (names,) = (s.tensor for s in stream.direct() if not tensors[s.tensor].is_floating_point())
    links = {slot.link for slot in stream.linked()}
    decision = random_decision(model, torch.Generator().manual_seed(6))
    before = {link: tensors[names][tensors[link]] for link in links}
    cut_(model, table, decision.keeps, decision.removed)
    after = named_tensors(model)
    for link in links:
        assert torch.equal(
            after[names][after[link]], sliced(before[link], link, table, decision.keeps)
        )


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_after_surgery_every_parameter_lives_in_the_store_and_is_trained(case: Case) -> None:
    model = make(case)
    compressor = Compressor(model, 0.0, CompressorOptions(lr=1e-3))
    silence_(model, random_decision(model, torch.Generator().manual_seed(9), removed=1).keeps)
    assert compressor.event_().dropped
    store = compressor.optimizer.store
    live = dict(model.named_parameters())
    assert live.keys() == store.segments.keys()
    assert sum(p.numel() for p in live.values()) == len(store) == len(compressor.optimizer.momentum)
    for name, parameter in live.items():
        start = store.segments[name].start
        assert parameter.data_ptr() == store.weight[start:].data_ptr()
        assert parameter.requires_grad
        assert parameter.is_leaf
    old = {name: parameter.detach().clone() for name, parameter in live.items()}
    # The task may not reach them all: a random structure writes where nobody reads.
    value = sum(parameter.square().sum() for parameter in live.values())
    value.backward()
    model.train()
    compressor.step(value)
    for name, parameter in live.items():
        assert parameter.detach().norm() < old[name].norm(), name


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_structure_rebuilds_the_same_model(case: Case) -> None:
    model = make(case)
    decision = random_decision(model, torch.Generator().manual_seed(2), removed=1)
    cut_(model, model.axis_table(), decision.keeps, decision.removed)
    again = case.row.rebuild(json.loads(json.dumps(model.structure()))).double().eval()
    assert again.structure() == model.structure()
    tensors, expected = named_tensors(again), named_tensors(model)
    assert {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in expected.items()}
    for name, tensor in expected.items():
        if not tensor.is_floating_point():
            assert torch.equal(tensors[name], tensor), name
    again.load_state_dict(model.state_dict())
    assert torch.equal(output(again, case), output(model, case))
