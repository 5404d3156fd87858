"""Which indices go, and which of them a batch takes back."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gaugelasso.axes import named_tensors
from gaugelasso.compress import reference
from gaugelasso.compress.drop import (
    channel_rms,
    close_and_round,
    dominates_norm,
    grains,
    hold_back_,
    next_to_go,
    trust_drop,
)
from gaugelasso.compress.guard import MAX_PROBES, keep_what_batch_needs, temporarily_zeroed
from gaugelasso.compress.surgery import cut_
from gaugelasso.models import Transformer, TransformerSpec
from tests.compress.decisions import kept, uniform
from tests.compress.test_cascade import relay
from tests.toys import exact, pairs, penalise


def test_channel_rms_is_the_geometric_mean_of_both_sides() -> None:
    model = pairs((3, 4, 2))
    store, penalty = penalise(model)
    rms = channel_rms(penalty.groups, store.weight)["axis0"]
    (axis,), tensors = model.axis_table().axes, named_tensors(model)
    eps_a, eps_b = (reference.side_rms(axis, slots, tensors) for _, slots in axis.sides())
    assert torch.allclose(eps_a, model.a0.detach().square().mean(1).sqrt())
    assert torch.allclose(rms, (eps_a * eps_b).sqrt())


def kept_of_three(rms: list[float], held: list[bool], silences: bool = True) -> list[bool]:
    """Trust-drop at threshold 1 on an axis of three indices."""
    table = pairs((3, 1, 1)).axis_table()
    table = replace(table, axes=(replace(table["axis0"], silences=silences),))
    keeps = trust_drop(table, {"axis0": exact(rms)}, 1.0, {"axis0": torch.tensor(held)})
    return keeps["axis0"].tolist()


def test_an_index_goes_at_the_threshold_and_stays_above_it() -> None:
    assert kept_of_three([0.5, 1.0, 1.5], [False] * 3) == [False, False, True]


def test_a_held_index_stays() -> None:
    assert kept_of_three([0.5, 1.0, 1.5], [True, False, False]) == [True, False, True]


@pytest.mark.parametrize("silences", [True, False])
def test_an_axis_that_does_not_silence_its_owner_keeps_its_strongest(silences: bool) -> None:
    kept = kept_of_three([0.1, 0.3, 0.2], [False] * 3, silences)
    assert kept == [False, not silences, False]


@pytest.mark.parametrize(
    ("keep", "grain", "kept"),
    [
        ([0, 0, 0, 0, 1], 1, [4]),
        ([0, 0, 0, 0, 1], 2, [1, 4]),
        ([0, 0, 0, 0, 1], 4, [0, 1, 3, 4]),
        ([1, 0, 1, 1, 1], 4, [0, 2, 3, 4]),
        ([0, 0, 0, 0, 1], 6, [0, 1, 2, 3, 4]),
        ([0, 0, 0, 0, 0], 4, []),
    ],
    ids=["one", "two", "four", "from no multiple to the next below", "too few", "all go"],
)
def test_the_strongest_stay_until_the_grain_is_full(
    keep: list[int], grain: int, kept: list[int]
) -> None:
    keeps = {"axis0": torch.tensor(keep, dtype=torch.bool)}
    hold_back_(keeps, {"axis0": exact([0.3, 0.4, 0.1, 0.2, 9.0])}, {"axis0": grain})
    assert keeps["axis0"].nonzero().view(-1).tolist() == kept


@pytest.mark.parametrize(("rope", "multiple", "pairs"), [(True, 8, 4), (True, 3, 3), (False, 8, 8)])
def test_a_pair_is_two_channels_and_the_stream_has_any_width(
    rope: bool, multiple: int, pairs: int
) -> None:
    spec = TransformerSpec.uniform(
        width=3, layers=1, heads=1, d_k=4, d_v=2, d_f=3, length=4, inputs=5, outputs=3, rope=rope
    )
    grain = grains(Transformer(spec).axis_table(), multiple)
    assert grain.pop("operators.attention_0.d_k") == pairs
    assert grain.pop("D") == 1
    assert set(grain.values()) == {multiple}


def test_a_width_is_filled_up_from_what_the_cascade_takes() -> None:
    """Three of four sites lose their readers; one of these is held back, with its writers."""
    model = uniform(width=4)
    table, tensors = model.axis_table(), named_tensors(model)
    rms = {name: torch.arange(float(n)) for name, n in table.widths(tensors).items()}
    keeps = {name: torch.ones(n, dtype=torch.bool) for name, n in table.widths(tensors).items()}
    for reader in ("operators.attention_0.d_ai", "operators.mlp_0.d_mi", "classifier.d_c"):
        keeps[reader][:3] = False
    alone = close_and_round(table, tensors, keeps, rms, 1)
    decision = close_and_round(table, tensors, keeps, rms, 2)
    assert kept(alone, "embedding.d_e") == kept(alone, "D") == [3]
    for axis in ("embedding.d_e", "D", "operators.mlp_0.d_mi", "operators.attention_0.d_ao"):
        assert kept(decision, axis) == [2, 3]


@pytest.mark.parametrize("silences", [True, False])
def test_what_gives_least_for_its_price_would_go_next(silences: bool) -> None:
    table = pairs((2, 1, 1), (3, 1, 1)).axis_table()
    table = replace(table, axes=(replace(table["axis0"], silences=silences), table["axis1"]))
    utility = {"axis0": exact([1.0, 2.0]), "axis1": exact([0.0, 40.0, 20.0])}
    prices = {"axis0": np.array([2.0, 2.0]), "axis1": np.array([0.0, 10.0, 10.0])}
    rows = next_to_go(table, utility, prices, most=3)
    # An index that saves nothing is not worth a cut; the last key of an attention stays.
    expected = [("axis0", 0, 2.0, 0.5), ("axis0", 1, 2.0, 1.0), ("axis1", 2, 10.0, 2.0)]
    if not silences:
        expected[1:] = [("axis1", 2, 10.0, 2.0), ("axis1", 1, 10.0, 4.0)]
    assert [tuple(row.values()) for row in rows] == expected
    assert list(rows[0]) == ["axis", "index", "price", "utility_per_fma"]


def test_an_input_rules_by_its_share_of_the_normaliser() -> None:
    """A share of weight times energy, on the reader's own axis and at its site."""
    model = relay()
    table, tensors = model.axis_table(), named_tensors(model)
    assert dominates_norm(table, tensors)["D"].tolist() == [True, True, True]
    wide = uniform()
    tensors = named_tensors(wide)
    for norm in wide.axis_table().norms:
        tensors[norm.weight].copy_(torch.tensor([0.5, 1e-3, 0.5]))
        tensors[norm.energy].copy_(torch.tensor([1.0, 1.0, 1e-3]))
    tensors["classifier.read.energy"][1] = 100
    held = dominates_norm(wide.axis_table(), tensors)
    assert held["operators.mlp_0.d_mi"].tolist() == [True, False, False]
    assert held["classifier.d_c"].tolist() == [True, True, False]
    assert held["D"].tolist() == [True, True, False]
    assert not held["operators.mlp_0.d_f"].any()


def test_silence_is_the_cut_and_leaves_no_trace() -> None:
    model = pairs((3, 4, 2))
    tensors = named_tensors(model)
    before = model.a0.detach().clone()
    keep = torch.tensor([True, False, True])
    with temporarily_zeroed(model.axis_table(), tensors, {"axis0": keep}):
        assert torch.equal(model.a0.detach(), before * keep[:, None])
    assert torch.equal(model.a0.detach(), before)


def test_silence_takes_an_input_out_of_its_normaliser_too() -> None:
    """What a probe sees is what surgery leaves."""
    model = uniform().double().eval()
    table, tensors = model.axis_table(), named_tensors(model)
    keeps = {name: torch.ones(n, dtype=torch.bool) for name, n in table.widths(tensors).items()}
    keeps["classifier.d_c"][1] = False
    tokens = torch.tensor([[0, 3, 1, 4]])
    with torch.no_grad():
        with temporarily_zeroed(table, tensors, keeps):
            probed = model(tokens)
        cut_(model, table, keeps)
        assert torch.allclose(model(tokens), probed, rtol=1e-12, atol=0)


def spared(needed: list[int], keep: list[bool], bound: float = 0.5) -> list[bool]:
    """What is kept when the loss is the number of needed indices that are silent."""
    model = pairs((4, 2, 2))
    tensors = named_tensors(model)

    def probe() -> float:
        return float(sum(not model.a0[index].any() for index in needed))

    keeps = {"axis0": torch.tensor(keep)}
    return keep_what_batch_needs(model.axis_table(), tensors, keeps, probe, bound)["axis0"].tolist()


def test_only_the_missed_index_is_taken_back() -> None:
    assert spared([1], [True, False, False, True]) == [True, True, False, True]


def test_drops_that_nobody_misses_stand() -> None:
    assert spared([0], [True, False, False, True]) == [True, False, False, True]


def test_drops_that_only_hurt_together_are_not_all_made() -> None:
    """Two of three needed for the loss to stay: one of them may go."""
    model = pairs((4, 2, 2))

    def probe() -> float:
        return float(sum(not model.a0[index].any() for index in range(3)) > 1)

    keeps = {"axis0": torch.tensor([False, False, False, False])}
    kept = keep_what_batch_needs(model.axis_table(), named_tensors(model), keeps, probe, 0.5)[
        "axis0"
    ]
    assert int((~kept[:3]).sum()) == 1
    assert not kept[3]


def test_a_loss_that_is_not_a_number_takes_every_drop_back() -> None:
    model = pairs((2, 2, 2))
    keeps = {"axis0": torch.tensor([False, True])}
    kept = keep_what_batch_needs(
        model.axis_table(), named_tensors(model), keeps, lambda: float("nan"), 1.0
    )
    assert kept["axis0"].all()


@pytest.mark.parametrize("needed", [range(0, 400, 2), range(400)], ids=["every other", "all"])
def test_the_search_for_needed_drops_is_bounded(needed: range) -> None:
    """What the search does not reach stays; what it admits is not needed."""
    model = pairs((400, 1, 1))
    probes = 0

    def probe() -> float:
        nonlocal probes
        probes += 1
        return float((model.a0[list(needed)] == 0).sum())

    keeps = {"axis0": torch.zeros(400, dtype=torch.bool)}
    kept = keep_what_batch_needs(model.axis_table(), named_tensors(model), keeps, probe, 0.5)
    assert probes == MAX_PROBES
    assert kept["axis0"][list(needed)].all()
    # As many as were admitted one by one before the end, in the table's order.
    gone = (~kept["axis0"]).nonzero().view(-1).tolist()
    others = sorted(set(range(400)) - set(needed))
    assert gone == others[: len(gone)]
    assert bool(gone) == bool(others)


def test_a_search_within_the_bound_ends_by_itself() -> None:
    model = pairs((400, 1, 1))
    probes = 0

    def probe() -> float:
        nonlocal probes
        probes += 1
        return float((model.a0[[7, 200, 399]] == 0).sum())

    keeps = {"axis0": torch.zeros(400, dtype=torch.bool)}
    kept = keep_what_batch_needs(model.axis_table(), named_tensors(model), keeps, probe, 0.5)
    assert kept["axis0"].nonzero().view(-1).tolist() == [7, 200, 399]
    assert probes < MAX_PROBES
