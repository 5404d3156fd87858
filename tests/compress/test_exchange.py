"""Channel exchange: neutral in work, protected at birth, undone and resumed to the last bit."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso.axes import named_tensors
from gaugelasso.compress import exchange, growth, pricing
from gaugelasso.compress.checks import check_exchange
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.compress.events import Drop, Event
from gaugelasso.compress.exchange import totals
from gaugelasso.compress.saved_state import SavedState
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from tests.compress.small_retrieval import loss, model
from tests.examples import example
from tests.tiny_runs import assert_same_run, finished, killed, rows, start

EVERY = 20
# The tiny run with exchanges; its events are five steps apart.
RUN: dict[str, Any] = {"compress__exchange": 10, "compress__trust": 0.5}


def compressor(network: Transformer | None = None, **options: Any) -> Compressor:
    """At the step of its first exchange; a tiny rate, so that nothing else is cut."""
    given = {"lr": 1e-9, "exchange": EVERY, "sinkhorn_sweeps": 1} | options
    made = Compressor(network or model(), 2.0, CompressorOptions(**given))
    network = made.model
    network.train()
    loss(network).backward()  # energies, and gradients that a step would clear
    for parameter in network.parameters():
        parameter.grad = None
    made.steps = EVERY
    return made


def exchanged(**options: Any) -> tuple[Compressor, Event]:
    made = compressor(**options)
    event = made.event_()
    assert event.grown
    return made, event


# --- what moves --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"accounting": "paper"}, {"accounting": "bytes"}, {"multiple": 2}],
    ids=str,
)
@pytest.mark.parametrize("settings", [{}, {"rope": False}, {"norm": "tied"}], ids=str)
def test_an_exchange_costs_no_work(options: dict[str, Any], settings: dict[str, Any]) -> None:
    """The work does not grow, and what is left over pays for no further index."""
    made = compressor(model(**settings), **options)
    before = made.widths
    event = made.event_()
    assert not event.dropped
    assert event.exchanged
    assert event.grown
    assert event.fma <= event.fma_before
    # The price of one more index of a receiver, at the widths that it has now.
    dearest = max(_price(made, name) for name in event.grown) * options.get("multiple", 1)
    assert event.fma_before - event.fma < dearest
    for name, size in made.widths.items():
        assert size == before[name] - event.exchanged.get(name, 0) + event.grown.get(name, 0)
    assert event.widths == made.widths
    assert event.fma == made.fma


def _price(made: Compressor, name: str) -> float:
    added = growth.grown_widths(made.state.table, {name: 1})
    widths = {each: size + added.get(each, 0) for each, size in made.widths.items()}
    return float(pricing.count(made.state.plan.terms, widths)) - made.fma


def test_work_goes_from_the_least_useful_to_the_most_useful() -> None:
    made = compressor(sinkhorn_sweeps=0, anchor=0)
    none = {name: torch.zeros(n, dtype=torch.bool) for name, n in made.widths.items()}
    sums = totals(made.utility(), made.prices, none)
    yields = {name: utility / work for name, (utility, work) in sums.items()}
    event = made.event_()
    assert max(yields[name] for name in event.exchanged) < min(yields[n] for n in event.grown)


def test_the_index_that_gives_least_goes_first() -> None:
    network = model()
    made = compressor(network, sinkhorn_sweeps=0, anchor=0)
    tensors = named_tensors(network)
    with torch.no_grad():  # one filter is weak, on both sides, but not within a step of zero
        tensors["operators.mlp_1.up"][:, 3] *= 1e-3
        tensors["operators.mlp_1.down"][3] *= 1e-3
    taken: list[Drop] = []
    made.on_drop(taken.append)
    assert made.event_().exchanged["operators.mlp_1.d_f"]
    (filters,) = (drop for drop in taken if drop.axis == "operators.mlp_1.d_f")
    assert 3 in filters.indices


def test_a_hook_can_keep_what_an_exchange_would_take() -> None:
    made = compressor()
    made.on_drop(lambda drop: False)
    event = made.event_()
    assert not event.exchanged
    assert not event.grown
    assert event.fma == event.fma_before


def test_what_the_receivers_have_no_room_for_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SHARE", 0.3)
    _, free = exchanged()
    room = growth.room
    monkeypatch.setattr(growth, "room", lambda *given: min(room(*given), 1))
    made = compressor()
    prices = made.prices
    event = made.event_()
    assert sum(event.exchanged.values()) < sum(free.exchanged.values())
    assert event.grown
    lost = event.fma_before - event.fma
    assert lost < max(float(prices[name].max()) for name in event.exchanged)


def test_of_the_taken_indices_those_that_are_not_paid_for_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the cut there is less room than before it."""
    monkeypatch.setattr(exchange, "SHARE", 0.3)
    _, free = exchanged()
    room, before = exchange._Plan._room, compressor().state.readable()

    def less(plan: Any, axis: Any, tensors: Any) -> float:
        most = room(plan, axis, tensors)
        uncut = all(tensors[name].shape == tensor.shape for name, tensor in before.items())
        return most if uncut else min(most, 1)

    monkeypatch.setattr(exchange._Plan, "_room", less)
    made = compressor()
    prices = made.prices
    event = made.event_()
    assert event.grown
    assert sum(event.exchanged.values()) < sum(free.exchanged.values())
    lost = event.fma_before - event.fma
    assert lost < max(float(prices[name].max()) for name in event.exchanged)


def test_what_cannot_be_spent_for_the_most_part_is_no_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be a cut."""
    _, event = exchanged()
    assert event.fma < event.fma_before
    monkeypatch.setattr(exchange, "SPENT", 1.0)
    event = compressor().event_()
    assert not event.exchanged
    assert event.fma == event.fma_before


def test_a_linear_axis_has_room_up_to_its_rank() -> None:
    """Further indices would be a rotation of those that it has."""
    network = model(heads=1, d_v=12)
    axis = network.axis_table()["operators.attention_0.d_v"]
    assert growth.rank(axis, named_tensors(network)) == 12  # of a map from 12 channels to 12
    assert growth.room(network.axis_table(), axis, named_tensors(network)) == math.inf
    with torch.no_grad():  # what it has is worth most
        for name in ("value", "out"):
            for layer in (0, 1):
                named_tensors(network)[f"operators.attention_{layer}.{name}"].mul_(100)
    event = compressor(network).event_()
    assert event.grown
    assert not any(name.endswith("d_v") for name in event.grown)


# --- when ----------------------------------------------------------------------------------


def test_an_exchange_is_held_at_the_first_event_that_is_due() -> None:
    made = compressor()
    events = []
    for made.steps in (EVERY - 1, EVERY + 3, EVERY + 9, 2 * EVERY + 2, 2 * EVERY + 3):
        events.append(made.event_())
    assert [bool(event.grown) for event in events] == [False, True, False, False, True]


@pytest.mark.parametrize(("left", "held"), [(EVERY - 1, False), (EVERY, True)])
def test_none_is_held_when_new_indices_would_have_no_time(left: int, held: bool) -> None:
    made = compressor()
    made.end = made.steps + left
    assert bool(made.event_().grown) is held


def test_without_exchange_nothing_is_kept_or_written_of_it() -> None:
    made = compressor(exchange=0)
    event = made.event_()
    assert not made.state.births
    assert not {"grown", "exchanged"} & event.to_dict().keys()
    assert not any("grace" in name or "growth" in name for name in made.state_tensors())


# --- grace ---------------------------------------------------------------------------------


def test_a_new_index_is_not_dropped_before_its_time_and_can_go_after() -> None:
    made, event = exchanged()
    silent = [n for n in event.grown if made.state.table[n].growth != "linear"]
    assert silent
    born = {name: made.widths[name] for name in silent}
    made.steps = 2 * EVERY - 1
    early = made.event_()
    assert not set(silent) & early.dropped.keys()
    assert {name: made.widths[name] for name in silent} == born
    made.steps = 2 * EVERY
    # It was never trained: side A is zero still, which is within any step of zero.
    late = made.event_()
    for name in silent:
        assert late.dropped[name] == event.grown[name]


def test_grace_follows_cuts_and_undo() -> None:
    made, event = exchanged()
    record = made.state.births
    assert record is not None
    (name,) = [n for n in event.grown if made.state.table[n].growth != "linear"][:1]
    number, before = event.grown[name], record.protected(EVERY + 1)
    assert before[name].tolist()[-number:] == [True] * number
    assert int(before[name].sum()) == number
    undo = made.state.snapshot_modules()
    keeps = {n: torch.ones(size, dtype=torch.bool) for n, size in made.widths.items()}
    record.cut_({**keeps, name: torch.arange(len(keeps[name])) > 0})
    assert record.protected(EVERY + 1)[name].tolist() == before[name].tolist()[1:]
    undo()
    after = record.protected(EVERY + 1)
    assert all(torch.equal(after[n], before[n]) for n in before)


# --- undone, kept, resumed ------------------------------------------------------------------


def test_an_exchange_that_costs_too_much_is_undone_completely() -> None:
    network = model()
    made = compressor(network, drop_tolerance=0.1)
    calls = iter([1.0, 1.0, 1.0, 9.0])  # before, balanced, tried, exchanged
    made.probe = lambda: next(calls)
    widths, structure = made.widths, network.structure()
    event = made.event_()
    assert event.undone == {"exchange": 9.0}
    assert not event.grown
    assert not event.exchanged
    assert made.widths == widths
    assert network.structure() == structure
    assert made.state.births is not None
    assert not any(bool(new.any()) for new in made.state.births.protected(EVERY).values())
    assert made.state.optimizer.store.separated(network) is None


def test_a_state_in_memory_is_that_before_the_exchange() -> None:
    made = compressor()
    saved = SavedState(made.state, made.resume_state)
    before = {
        name: t.clone() for name, t in {**named_tensors(made.model), **made.state_tensors()}.items()
    }
    made.event_()
    saved.load_(made.state, made.resume_state)
    after = {**named_tensors(made.model), **made.state_tensors()}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_equal_seeds_grow_alike_and_others_do_not() -> None:
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        made, _ = exchanged()
        weights.append(made.state.plan.store.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run with exchanges, finished."""
    return finished(tmp_path_factory.mktemp("exchange"), **RUN)


@pytest.mark.parametrize("died_at", [13, 23, 28])
def test_a_resumed_run_grows_as_one_that_never_stopped(
    run: Path, tmp_path: Path, died_at: int
) -> None:
    events = rows(run, "events.jsonl")
    grown = [event["step"] for event in events if event.get("grown")]
    assert min(grown) < 20
    assert max(grown) >= 20
    killed(tmp_path, died_at, **RUN)
    start(tmp_path, existing="resume", **RUN).run()
    assert_same_run(run, tmp_path / "run")


# --- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, 2.5, True, "often"])
def test_a_number_of_steps_that_is_none_is_refused(value: Any) -> None:
    message = f"compress.exchange = {value!r}: must be a whole number of at least 0"
    with pytest.raises(UserError, match=re.escape(message)):
        CompressorOptions(exchange=value)


def test_a_profile_has_no_times_of_axes_that_grow() -> None:
    made = compressor()
    timed = replace(made.state.options, accounting="latency")
    made.state.options = timed
    message = "compress.exchange = 20: a profile has no times of axes that grow; use the accounting"
    with pytest.raises(UserError, match=re.escape(message)):
        check_exchange(made.state)


def test_a_table_that_says_nothing_of_growth_is_refused() -> None:
    network = example("your_model").Perceptron(3, 5, 2)
    message = "compress.exchange = 20: the axis table of Perceptron does not say how an axis may"
    with pytest.raises(UserError, match=re.escape(message)):
        Compressor(network, 1.0, CompressorOptions(exchange=EVERY))
