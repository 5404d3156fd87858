"""Procrustes maps, the tied norm, mistakes, and growth of a model together with its optimizer."""

import re

import pytest
import torch

from gaugelasso.axes import AxisError, named_tensors
from gaugelasso.compress import growth
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.compress.surgery import swap_
from gaugelasso.models import Transformer, TransformerSpec

TOKENS = torch.tensor([[0, 3, 1, 4], [2, 2, 0, 1]])
VALUES, KEYS = "operators.attention_0.d_v", "operators.attention_0.d_k"


def small(**settings: object) -> Transformer:
    sizes = {"width": 6, "layers": 1, "heads": 2, "d_k": 4, "d_v": 4, "d_f": 5, "length": 4}
    spec = TransformerSpec.uniform(**(sizes | {"inputs": 5, "outputs": 3} | settings))
    return Transformer(spec, seed=1).double().eval()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("size", "number"), [(1, 1), (5, 1), (5, 3), (3, 7), (40, 2)])
def test_a_procrustes_map_is_orthonormal_and_near_to_no_change(size: int, number: int) -> None:
    q = growth.procrustes_map(size, number, seeded())
    assert q.shape == (size + number, size)
    assert torch.allclose(q.T @ q, torch.eye(size).double(), atol=1e-12)
    # The old channels: symmetric, with no negative eigenvalue, and most of them 1.
    old = q[:size]
    assert torch.allclose(old, old.T, atol=1e-12)
    values = torch.linalg.eigvalsh(old)
    assert float(values.min()) > -1e-12
    assert torch.allclose(values[min(number, size) :], torch.ones(1).double(), atol=1e-12)
    # The new ones have norms of order one: their squares sum to what the old ones lost.
    assert float(q[size:].norm(dim=1).max()) <= 1 + 1e-12
    assert float(q[size:].norm(dim=1).min()) > 0.1
    assert not torch.allclose(q, growth.procrustes_map(size, number, seeded(1)), atol=0.01)
    assert float(q[size:].square().sum()) == pytest.approx(size - float(values.square().sum()))


def test_no_rotation_is_nearer_to_no_change() -> None:
    q = growth.procrustes_map(6, 2, seeded(3))
    target = torch.eye(8, 6).double()
    for seed in range(20):
        r, _ = torch.linalg.qr(torch.randn(6, 6, generator=seeded(seed), dtype=torch.float64))
        assert float((q - target).norm()) <= float((q @ r - target).norm())


def test_a_wide_axis_hardly_changes() -> None:
    """Entries of the old block are 1 - O(k/d)."""
    q = growth.procrustes_map(200, 1, seeded())
    assert float((1 - q[:200].diagonal()).mean()) < 2 / 200


@pytest.mark.parametrize("axis", ["d_ai", "d_k", "d_v", "d_ao"])
def test_with_the_tied_norm_growth_changes_no_output(axis: str) -> None:
    """There a gain is a part of the normaliser, so only a zero gain is silent."""
    spec = small(norm="tied").spec()
    attention = spec.operators[0]
    narrow = attention.__class__(
        **{**vars(attention), "reads": attention.reads[:4], "writes": attention.writes[1:]}
    )
    parts = {**vars(spec), "operators": (narrow, *spec.operators[1:])}
    model = Transformer(TransformerSpec(**parts), seed=2).double().eval()
    before = model(TOKENS)
    births = {f"operators.attention_0.{axis}": 1, "D": 2, "operators.mlp_0.d_f": 3}
    table = model.axis_table()
    swap_(model, growth.grow(named_tensors(model), table, births, seeded()).tensors)
    assert torch.allclose(model(TOKENS), before, rtol=0, atol=1e-12)


def test_a_new_reader_names_what_is_written_and_a_new_writer_what_is_read() -> None:
    spec = small().spec()
    attention, mlp = spec.operators
    # Site 5 is written by the MLP alone, after attention has read, and nobody reads site 4.
    attention = attention.__class__(**{**vars(attention), "reads": (0, 1), "writes": (0, 1)})
    mlp = mlp.__class__(**{**vars(mlp), "reads": (0, 1, 2), "writes": (0, 5)})
    ends = {"embed": (0, 1, 2, 3, 4), "classify": (0, 1, 2, 3, 5)}
    model = Transformer(TransformerSpec(**{**vars(spec), **ends, "operators": (attention, mlp)}))
    table, tensors = model.axis_table(), named_tensors(model)
    reads, writes = (table[f"operators.attention_0.{kind}"] for kind in ("d_ai", "d_ao"))
    assert growth.room(table, reads, tensors) == 3
    assert growth.room(table, writes, tensors) == 3
    grown = growth.grow(tensors, table, {reads.name: 3, writes.name: 3}, seeded()).tensors
    assert sorted(grown["operators.attention_0.read.sites"].tolist()) == [0, 1, 2, 3, 4]
    assert sorted(grown["operators.attention_0.write.sites"].tolist()) == [0, 1, 2, 3, 5]


@pytest.mark.parametrize(
    ("births", "message"),
    [
        ({"d_v": 1}, "there is no axis 'd_v' to grow; axes are embedding.d_e, "),
        ({VALUES: -1}, f"axis {VALUES!r} cannot grow by -1 indices"),
        (
            {"operators.attention_0.d_ai": 1},
            "cannot grow by 1: there are 0 further indices that its position map could name",
        ),
    ],
)
def test_growth_that_cannot_be_names_the_axis(births: dict[str, int], message: str) -> None:
    model = small()
    with pytest.raises(AxisError, match=re.escape(message)):
        growth.grow(named_tensors(model), model.axis_table(), births, seeded())


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_momentum_is_rotated_as_the_weights_are(optimizer: str) -> None:
    """What is a copy of the weights before an isometric growth is one after it."""
    model = small(rope=False).train()
    compressor = Compressor(model, 0.0, CompressorOptions(lr=1e-3, optimizer=optimizer))
    compressor.step(lambda: model(TOKENS).square().mean())
    for name, view in compressor.optimizer.states()["momentum"].items():
        view.copy_(model.get_parameter(name).detach())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    compressor.state.grow_({VALUES: 2, KEYS: 1}, seeded(), "after growth")
    for name, view in compressor.optimizer.states()["momentum"].items():
        torch.testing.assert_close(view, model.get_parameter(name).detach(), rtol=0, atol=1e-12)
    for leaf in ("query", "key", "value", "out"):
        name = f"operators.attention_0.{leaf}"
        new = model.get_parameter(name).detach()
        assert new.shape != before[name].shape
        assert float(new.norm()) == pytest.approx(float(before[name].norm()))


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_model_store_and_optimizer_grow_together(optimizer: str) -> None:
    model = small(rope=False).train()
    compressor = Compressor(model, 0.0, CompressorOptions(lr=1e-3, optimizer=optimizer))
    state = compressor.state
    for _ in range(3):
        compressor.step(lambda: model(TOKENS).square().mean())
    before, rebuilds, work = model.eval()(TOKENS), state.rebuilds, state.fma
    old = {kind: dict(views) for kind, views in compressor.optimizer.states().items()}
    state.grow_({VALUES: 2, KEYS: 1, "operators.mlp_0.d_f": 1}, seeded(), "after growth")
    assert torch.allclose(model(TOKENS), before, rtol=0, atol=1e-12)
    assert state.rebuilds == rebuilds + 1
    assert state.optimizer.store.separated(model) is None
    table, grown = state.table, Transformer(model.spec()).double()
    assert state.fma == Compressor(grown, 0.0).fma > work
    for kind, views in compressor.optimizer.states().items():
        assert views.keys() == old[kind].keys()
        for name, view in views.items():
            assert view.shape == model.get_parameter(name).shape
            # A rotation keeps the norm of momentum, and the sum of squares; what is new has none.
            order = 2 if kind == "momentum" else 1
            assert float(view.norm(order)) == pytest.approx(float(old[kind][name].norm(order)))
    assert table.widths(named_tensors(model))[VALUES] == 6
    model.train()
    compressor.step(lambda: model(TOKENS).square().mean())
    assert compressor.resume_state.finite()
