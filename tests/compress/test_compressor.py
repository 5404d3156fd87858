"""The conductor: when events happen, what hooks may do, what is on record."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gaugelasso.axes import AxisTable, named_tensors, spread
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.compress.events import Drop
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer, TransformerSpec

SPEC = TransformerSpec.uniform(
    width=6, layers=1, heads=2, d_k=6, d_v=4, d_f=5, length=5, inputs=7, outputs=7
)
TOKENS = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(0))
FILTERS = "operators.mlp_0.d_f"


def start(
    probe: Callable[[Transformer], float] | None = None, target: float = 1e9, **options: Any
) -> Compressor:
    model = Transformer(SPEC).double()
    return Compressor(
        model,
        target,
        CompressorOptions(**({"lr": 1e-3} | options)),
        (lambda: probe(model)) if probe else None,
    )


def task_loss(model: Any) -> Tensor:
    logits = model(TOKENS)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())


def train(compressor: Compressor, steps: int) -> list[Any]:
    events = []
    for _ in range(steps):
        loss = task_loss(compressor.model)
        loss.backward()
        events.append(compressor.step(loss))
    return events


@torch.no_grad()
def fade_(compressor: Compressor, name: str, indices: list[int], norms: bool = True) -> None:
    """Bring indices of an axis within the trust of zero, with their share of the normalisers."""
    table, tensors = compressor.state.table, named_tensors(compressor.model)
    shares = {norm.weight for norm in table.norms} if norms else set()
    axis = table[name]
    factor = torch.ones(compressor.widths[name]).double()
    factor[indices] = 1e-6
    riders = tuple(slot for slot in axis.riders if slot.tensor in shares)
    for slot in axis.side_a + axis.side_b + riders:
        tensors[slot.tensor].mul_(spread(factor, slot, tensors))


def test_the_public_face_fits_on_a_screen() -> None:
    """What only a trainer or a checkpoint needs is on the parts, not here."""
    step = {"step", "finish_step_", "set_lr_", "set_loss_target_", "set_pressure_"}
    run = {"finish", "done"}
    event = {"event_", "on_drop"}
    progress = {"fma", "work_target_met", "parameters", "widths", "structure", "prices", "utility"}
    scalars = {"rho", "skipped", "failing"}
    state = {"state_tensors", "load_state_tensors_", "optimizer"}
    public = {name for name in vars(Compressor) if not name.startswith("_")}
    assert public == step | run | event | progress | scalars | state


# --- hooks ---------------------------------------------------------------------------


def test_what_cannot_be_compressed_is_told_so() -> None:
    with pytest.raises(TypeError, match="Linear does not say what can be cut out of it"):
        Compressor(torch.nn.Linear(3, 3), 0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="step wants the loss that backward was called on"):
        start().step(0.5)  # type: ignore[arg-type]


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


def test_switched_off_is_plain_training() -> None:
    compressor = start(interval=1, solver="fixed", rho=1.0)
    plain = start(target=-1.0)
    compressor.set_pressure_(False)
    assert train(compressor, 3) == [None] * 3
    train(plain, 3)
    assert torch.equal(compressor.optimizer.store.weight, plain.optimizer.store.weight)


def test_pressure_moves_weights_but_not_momentum() -> None:
    pressed, plain = start(solver="fixed", rho=1.0), start(solver="fixed", rho=0.0)
    train(pressed, 1)
    train(plain, 1)
    assert torch.equal(pressed.optimizer.momentum, plain.optimizer.momentum)
    assert torch.equal(pressed.optimizer.second, plain.optimizer.second)
    assert not torch.equal(pressed.optimizer.store.weight, plain.optimizer.store.weight)


def slow_weights(compressor: Compressor) -> dict[str, Tensor]:
    tensors = named_tensors(compressor.model)
    return {norm.weight: tensors[norm.weight].clone() for norm in compressor.state.table.norms}


def test_slow_weights_follow_the_gain_under_pressure() -> None:
    """One step's share of `norm_rate`, after the step's own update of the gain."""
    compressor = start(solver="fixed", rho=1e-3, norm_rate=0.19, interval=2, lr=0.1)
    before = slow_weights(compressor)
    train(compressor, 1)
    tensors = named_tensors(compressor.model)
    for norm in compressor.state.table.norms:
        aim, energy = tensors[norm.gain].detach().square(), tensors[norm.energy]
        old = before[norm.weight]
        scaled = aim * (old * energy).sum() / (aim * energy).sum()
        assert torch.allclose(tensors[norm.weight], 0.9 * old + 0.1 * scaled, rtol=1e-6)
        assert not torch.allclose(tensors[norm.weight], old, rtol=1e-3)


def test_slow_weights_rest_without_pressure() -> None:
    compressor = start(target=-1.0)
    before = slow_weights(compressor)
    train(compressor, 3)
    for name, weight in slow_weights(compressor).items():
        assert torch.equal(weight, before[name])


def test_the_step_clears_the_gradient() -> None:
    compressor = start()
    train(compressor, 1)
    assert all(parameter.grad is None for parameter in compressor.model.parameters())


def test_a_restored_compressor_goes_on_as_the_first_would() -> None:
    first = start(interval=2, loss_smoothing=0.5)
    fade_(first, FILTERS, [1])
    fade_(first, "D", [2])
    train(first, 3)
    model = Transformer(TransformerSpec.from_dict(first.structure)).double()
    model.load_state_dict(first.model.state_dict())
    second = Compressor(model, 1e9, first.options)
    second.load_state_tensors_(first.state_tensors(), first.steps)
    train(first, 3)
    train(second, 3)
    assert first.widths[FILTERS] == 4
    assert torch.equal(first.optimizer.store.weight, second.optimizer.store.weight)


# --- options -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0),
        ("trust", -1.0),
        ("beta", 1.0),
        ("norm_rate", -0.1),
        ("interval", 0),
        ("multiple", 0),
        ("accounting", "joules"),
        ("sinkhorn_sweeps", -1),
    ],
)
def test_a_senseless_option_is_named(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name):
        CompressorOptions(**{name: value})


def test_zero_grad_in_between_changes_nothing() -> None:
    plain, cleared = start(), start()
    train(plain, 3)
    for _ in range(3):
        cleared.model.zero_grad()
        loss = task_loss(cleared.model)
        loss.backward()
        cleared.step(loss)
    for one, other in zip(plain.model.parameters(), cleared.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_frozen_parameter_is_refused() -> None:
    model = Transformer(SPEC)
    model.classifier.out.requires_grad_(False)
    with pytest.raises(UserError, match=r"'classifier\.out' is frozen"):
        Compressor(model, 1.0)


@pytest.mark.parametrize("change", [torch.bfloat16, "meta"], ids=["dtype", "device"])
def test_parameters_of_two_dtypes_or_devices_are_refused(change: Any) -> None:
    model = Transformer(SPEC)
    model.classifier.out = torch.nn.Parameter(model.classifier.out.detach().to(change))
    before = {name: parameter.dtype for name, parameter in model.named_parameters()}
    with pytest.raises(UserError, match=r"'classifier\.out' is torch\.\w+ on \w+; all") as caught:
        Compressor(model, 1.0)
    assert "'embedding.table' is torch.float32 on cpu" in str(caught.value)
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == before


def test_a_relative_step_bounds_the_change_of_what_is_not_a_matrix() -> None:
    bound = 0.01
    compressor = start(relative_step=bound, lr=0.1)
    before = {n: p.detach().clone() for n, p in compressor.model.named_parameters()}
    train(compressor, 1)
    matrices = compressor.state.table.matrices
    for name, new in compressor.model.named_parameters():
        change = (new.detach() - before[name]).abs()
        if name in matrices:
            assert change.square().mean().sqrt() > 0.05
        elif new.ndim == 1:
            assert change.max() > 0
            assert bool((change <= 1.001 * bound * before[name].abs()).all())


def test_a_rate_of_zero_moves_nothing() -> None:
    compressor = start(relative_step=0.05)
    compressor.set_lr_(0.0)
    with torch.no_grad():
        named_tensors(compressor.model)["embedding.write.scale"][0] = 0
    before = [parameter.detach().clone() for parameter in compressor.model.parameters()]
    train(compressor, 1)
    pairs = zip(before, compressor.model.parameters(), strict=True)
    assert all(torch.equal(old, new) for old, new in pairs)


def test_a_group_at_zero_can_come_back() -> None:
    compressor = start(relative_step=0.05, lr=0.1)
    scale = named_tensors(compressor.model)["embedding.write.scale"]
    with torch.no_grad():
        scale[0] = 0
    train(compressor, 3)
    assert scale[0] != 0


def test_without_sweeps_normalisers_are_anchored_all_the_same() -> None:
    compressor = start(sinkhorn_sweeps=0, anchor=0.01)
    train(compressor, 1)
    before = named_tensors(compressor.model)["classifier.read.gain"].detach().clone()
    compressor.event_()
    after = named_tensors(compressor.model)["classifier.read.gain"]
    assert not torch.allclose(after, before)


def test_normalisers_come_down_to_their_anchors_under_pressure() -> None:
    """By a factor of four at most in an event: steps become larger for it, beside the weights."""
    compressor = start(anchor=0.01)
    train(compressor, 1)

    def parts() -> tuple[Tensor, Tensor, Tensor]:
        tensors = named_tensors(compressor.model)
        norm = next(n for n in compressor.state.table.norms if n.gain == "classifier.read.gain")
        return tensors[norm.weight], tensors[norm.gain].detach(), tensors[norm.energy]

    def level() -> float:
        weight, _, energy = parts()
        return float((weight * energy).sum())

    for rho, share in ((0.0, 1.0), (1e-9, 0.25), (0.0, 1.0)):
        before = level()
        compressor.scalars.rho.fill_(rho)
        compressor.event_()
        assert level() / before == pytest.approx(share, rel=1e-4)
    compressor.scalars.rho.fill_(1e-9)
    seen = [compressor.event_() and level() for _ in range(20)]
    assert all(now > 0.2499 * then for then, now in pairwise(seen))
    _, gain, energy = parts()
    heard = gain.square() * energy
    typical = ((heard * energy.log()).sum() / heard.sum()).exp()
    assert seen[-1] == pytest.approx(0.01 * float(typical), rel=0.05)
    assert seen[-1] < 0.25 * before


def test_slow_weights_follow_from_the_first_pressure_on() -> None:
    """Before it they stand still; after it they go on when pressure is off, also when resumed."""
    compressor = start(lr=0.1, interval=1000)
    compressor.set_pressure_(False)
    still = slow_weights(compressor)
    train(compressor, 2)
    assert all(torch.equal(now, still[name]) for name, now in slow_weights(compressor).items())
    compressor.set_pressure_(True)
    train(compressor, 1)
    compressor.set_pressure_(False)
    resumed = start(lr=0.1, interval=1000)
    resumed.load_state_tensors_(compressor.state_tensors(), compressor.steps)
    for one in (compressor, resumed):
        before = slow_weights(one)
        train(one, 1)
        assert not all(torch.equal(now, before[name]) for name, now in slow_weights(one).items())


@pytest.mark.parametrize("gradient", [None, "nan", "inf", "1e200"])
def test_a_step_that_is_no_number_changes_nothing(gradient: str | None) -> None:
    """Not the weights, nor what the next step is made of."""
    compressor = start(lr=0.1, interval=4)
    train(compressor, 2)
    kept = {**named_tensors(compressor.model), **compressor.state_tensors()}
    before = {name: tensor.detach().clone() for name, tensor in kept.items()}
    loss = task_loss(compressor.model)
    loss.backward()
    weight = next(compressor.model.parameters())
    assert weight.grad is not None
    if gradient:
        weight.grad.view(-1)[0] = float(gradient)
    assert compressor.step(loss * (1 if gradient else float("nan"))) is None
    free = {"skipped", "failing", "streak", "rho", "pressed"}
    energies = {norm.energy for norm in compressor.state.table.norms}
    for name, tensor in {**named_tensors(compressor.model), **compressor.state_tensors()}.items():
        if name not in free | energies:
            assert torch.equal(tensor, before[name]), name
    assert float(compressor.rho) == 0
    assert [float(compressor.skipped), float(compressor.failing)] == [1, 1]
    # No event after it, although one was due: its inputs are not to be trusted.
    train(compressor, 1)
    assert [float(compressor.skipped), float(compressor.failing)] == [1, 0]
    assert compressor.resume_state.finite()


def test_a_table_without_costs_is_refused() -> None:
    class Free(Transformer):
        def axis_table(self) -> AxisTable:
            return replace(super().axis_table(), costs=())

    with pytest.raises(UserError, match="no index has a price under the accounting 'fma'"):
        Compressor(Free(SPEC), 1.0)
