"""Sites that two circuits take turns at become two, and nothing else changes."""

from dataclasses import replace

import pytest
import torch

from gaugelasso.axes import AxisTable, Slot, named_tensors
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.compress.split import Split, find_splits, split_
from gaugelasso.models import MlpSpec, Transformer, TransformerSpec

TOKENS = torch.tensor([[0, 3, 1, 4], [2, 2, 0, 1]])
# Stages of the stream: embedding writes 1, mlp_0 reads 2 writes 3, mlp_1 reads 4 writes 5,
# the classifier reads 6.
MLP_0_READS = 2


def relay(early: float) -> Transformer:
    """Embedding -> site 0 -> mlp_0 -> site 0 -> classifier; mlp_1 reads and writes site 1.

    `early` is the amplitude of what the embedding leaves at site 0.
    """
    model = Transformer(
        TransformerSpec(
            sites=(7, 9),
            length=4,
            layers=2,
            inputs=5,
            outputs=3,
            embed=(0, 1),
            classify=(0, 1),
            operators=(
                MlpSpec(0, reads=(0,), writes=(0,), filters=3),
                MlpSpec(1, reads=(1,), writes=(1,), filters=3),
            ),
        ),
        seed=1,
    ).double()
    model.embedding.write.scale.data[0] = early
    model.train()(TOKENS)
    return model


@pytest.mark.parametrize(("early", "number"), [(1e-6, 1), (1.0, 0)])
def test_a_site_is_split_where_a_far_louder_signal_takes_over(early: float, number: int) -> None:
    model = relay(early)
    splits = find_splits(model.axis_table(), named_tensors(model), 1e-5)
    assert splits == [Split("D", 0, MLP_0_READS)][:number]


def test_without_a_share_nothing_is_split() -> None:
    model = relay(1e-6)
    assert find_splits(model.axis_table(), named_tensors(model), 0.0) == []


def test_a_split_moves_the_late_half_and_keeps_the_function() -> None:
    model = relay(1e-9)
    table = model.axis_table()
    before = model(TOKENS)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    split_(model, table, [Split("D", 0, MLP_0_READS)])
    assert model.embedding.write.sites.tolist() == [0, 1]
    assert model.operators["mlp_0"].read.sites.tolist() == [0]
    assert model.operators["mlp_0"].write.sites.tolist() == [2]
    assert model.classifier.read.sites.tolist() == [2, 1]
    assert model.sites.tolist() == [7, 9, 7]
    assert torch.allclose(model(TOKENS), before, rtol=1e-6)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    model.axis_table().check(named_tensors(model))
    rebuilt = Transformer(model.spec())
    assert rebuilt.structure() == model.structure()


@pytest.mark.parametrize("spoil", ["unordered", "unheard", "shared link"])
def test_only_what_is_ordered_heard_and_free_to_move_is_split(spoil: str) -> None:
    model = relay(1e-6)
    table = model.axis_table()
    stream = table["D"]
    first = stream.side_b[0]
    if spoil == "unordered":
        table = with_reader(table, replace(first, stage=None))
    elif spoil == "unheard":
        table = replace(table, norms=table.norms[1:])
    else:
        table = with_reader(table, replace(first, link=stream.side_a[1].link))
    assert find_splits(table, named_tensors(model), 1e-5) == []


def with_reader(table: AxisTable, reader: Slot) -> AxisTable:
    """The same table with another first reader of the stream."""
    stream = table["D"]
    changed = replace(stream, side_b=(reader, *stream.side_b[1:]))
    axes = tuple(changed if axis.name == "D" else axis for axis in table.axes)
    return replace(table, axes=axes)


def test_a_split_leaves_the_optimizer_where_it_was() -> None:
    model = relay(1e-6)
    compressor = Compressor(model, 10.0, CompressorOptions(lr=1e-4, sinkhorn_sweeps=0, anchor=0))
    model(TOKENS).square().mean().backward()
    compressor.state.plan.store.collect_grads_()
    compressor.optimizer.observe_(torch.tensor(True))
    before = {kind: dict(views) for kind, views in compressor.optimizer.states().items()}
    before = {k: {n: t.clone() for n, t in views.items()} for k, views in before.items()}
    assert compressor.event_().splits == 1
    for kind, views in compressor.optimizer.states().items():
        assert all(torch.equal(view, before[kind][name]) for name, view in views.items())


def test_an_event_may_split_one_site_and_cut_another() -> None:
    """What a cut saves is told by the prices of the structure that it found."""
    model = relay(1e-6)
    options = CompressorOptions(lr=1e-4, sinkhorn_sweeps=0, anchor=0)
    compressor = Compressor(model, 10.0, options)
    tensors, axis = named_tensors(model), compressor.state.table["D"]
    with torch.no_grad():  # site 1 dies
        for slot in axis.side_a + axis.side_b:
            tensors[slot.tensor].index_fill_(
                slot.dim, (tensors[slot.link] == 1).nonzero().flatten(), 0.0
            )
        for norm in compressor.state.table.norms:
            tensors[norm.weight][tensors[norm.weight.replace(".weight", ".sites")] == 1] = 0.0
    event = compressor.event_()
    assert (event.splits, event.dropped["D"]) == (1, 1)
    assert event.prices["D"] > 0
    assert event.widths["D"] == 2


def test_an_event_splits_and_goes_on_training() -> None:
    model = relay(1e-6)
    compressor = Compressor(model, 10.0, CompressorOptions(lr=1e-4, interval=2))
    fma = compressor.fma
    event = compressor.event_()
    assert (event.splits, event.widths["D"], event.fma) == (1, 3, fma)
    for _ in range(4):
        loss = model(TOKENS).square().mean()
        loss.backward()
        compressor.step(loss)
    assert compressor.resume_state.finite()
