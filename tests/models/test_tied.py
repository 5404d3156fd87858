"""One table, two uses: its structure, its axis, and what a cut of one use means for the other."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gaugelasso
from gaugelasso.axes import named_tensors
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.compress.drop import cascade
from gaugelasso.compress.growth import grow, room
from gaugelasso.compress.pricing import ACCOUNTINGS, prices, total_fma
from gaugelasso.compress.split import Split, split_
from gaugelasso.compress.surgery import cut_, swap_
from gaugelasso.inference import InferenceModel
from gaugelasso.kernels import maps
from gaugelasso.models import SpecError, Transformer, TransformerSpec, same_network
from tests.contract.models import difference, silence_

SPEC = TransformerSpec.uniform(
    width=8, layers=2, heads=2, d_k=4, d_v=4, d_f=6, length=5, inputs=11, outputs=11
)
TIED = replace(SPEC, tied_head=True)
TOKENS = torch.arange(10).view(2, 5)


def model_of(spec: TransformerSpec = TIED) -> Transformer:
    """With scales and gains that differ."""
    model = Transformer(spec, seed=1).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 2, generator=generator)
    return model


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_fused_product_pads_what_is_odd(
    padded: bool, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no kernel, so that it runs on a CPU too; the inputs of a fused read are padded."""
    generator = torch.Generator().manual_seed(0)
    gain, rows, inputs = (torch.randn(s, generator=generator) for s in ((5,), (7, 5), (5, 4)))
    expected = rows @ (gain[:, None] * inputs)
    monkeypatch.setattr(maps, "fused", lambda _: True)
    given = torch.cat([inputs, torch.zeros(3, 4)]) if padded else inputs
    with torch.autocast("cpu", kind, enabled=kind is torch.bfloat16):
        found = maps.project_rows(given.to(kind), gain, rows)
    assert found.dtype is kind
    assert difference(found.float(), expected) < (1e-6 if kind is torch.float32 else 0.03)


# --- structure -----------------------------------------------------------------------------


def test_the_head_is_the_table() -> None:
    """As a model with a head of its own that is a copy."""
    tied, untied = model_of(), Transformer(SPEC, seed=1).double().eval()
    theirs = named_tensors(untied)
    with torch.no_grad():
        for name, tensor in named_tensors(tied).items():
            theirs[name].copy_(tensor)
        untied.classifier.out.copy_(tied.embedding.table.T)
        assert difference(tied(TOKENS), untied(TOKENS)) < 1e-12
    for model in (tied, untied):
        model(TOKENS).square().mean().backward()
    both = untied.embedding.table.grad + untied.classifier.out.grad.T
    assert difference(tied.embedding.table.grad, both) < 1e-12
    sizes = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert sizes[1] - sizes[0] == untied.classifier.out.numel() == SPEC.weights - TIED.weights


def test_structures_of_earlier_versions_are_not_tied() -> None:
    data = SPEC.to_dict()
    assert "tied_head" not in data
    assert not TransformerSpec.from_dict(data).tied_head
    again = Transformer.from_structure(TIED.to_dict())
    assert same_network(again.spec(), TIED)
    assert "classifier.out" not in again.state_dict()


@pytest.mark.parametrize(
    ("also", "reason"),
    [
        ({"outputs": 12}, "as many tokens as outputs"),
        ({"input_kind": "patches", "positions": True}, "as many tokens as outputs"),
        ({"classify": (0, 1)}, "writes 8 sites and the classifier reads 2"),
    ],
)
def test_what_cannot_be_tied_is_refused(also: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        replace(TIED, **also)


def test_the_check_passes() -> None:
    result = gaugelasso.check(
        model_of().float(),
        (TOKENS, TOKENS),
        lambda outputs, targets: F.cross_entropy(outputs.flatten(0, 1), targets.flatten()),
    )
    assert result.passed, str(result)


def test_work_and_memory_count_the_table_once() -> None:
    model, tensors = model_of(), named_tensors(model_of())
    table = model.axis_table()
    # Of the look-up and the product, the product is work. As parameters they are one.
    work = {name: total_fma(table, way, tensors) for name, way in ACCOUNTINGS.items()}
    untied = Transformer(SPEC).double()
    of = untied.axis_table(), named_tensors(untied)
    assert work["fma"] == total_fma(of[0], ACCOUNTINGS["fma"], of[1])
    there = total_fma(of[0], ACCOUNTINGS["paper"], of[1])
    assert there - work["paper"] == model.embedding.table.numel()


def test_the_inference_form_stores_it_once() -> None:
    many = {"inputs": 2000, "outputs": 2000}
    tied, untied = (InferenceModel(Transformer(replace(s, **many))) for s in (TIED, SPEC))
    table = tied.embedding.table
    assert table.shape == (2000, 8)
    saved = untied.weight_bytes - tied.weight_bytes
    assert 0.95 * table.numel() * 4 < saved < table.numel() * 4


# --- sites that are split: a column is written to one site and read from another ---------------


def split_model() -> Transformer:
    """Site 2 is two sites from the second layer on; column 2 reads the new one, 8."""
    model = model_of()
    split_(model, model.axis_table(), [Split("D", 2, stage=4)])
    assert model.embedding.write.sites[2] == 2
    assert model.classifier.read.sites[2] == 8
    return model


@pytest.mark.parametrize("site", [2, 8])
def test_a_column_stays_while_it_has_a_use(site: int) -> None:
    """The cut of a silent site is exact, although the other use of a column is not silent."""
    model = split_model()
    table, tensors = model.axis_table(), named_tensors(model)
    keeps = {name: torch.ones(n, dtype=torch.bool) for name, n in table.widths(tensors).items()}
    keeps["D"][site] = False
    decision = cascade(table, tensors, keeps)
    assert decision is not None
    assert decision.keeps["embedding.d_e"].all()
    silence_(model, {"D": keeps["D"]}, table)
    with torch.no_grad():
        before = model(TOKENS)
        cut_(model, table, decision.keeps, decision.removed)
        model.axis_table().check(named_tensors(model))
        assert difference(model(TOKENS), before) < 1e-12
    reading = [op for op in model.operators.values() if site in op.read.sites]
    assert not reading


def test_a_column_goes_with_the_sites_of_both_uses() -> None:
    model = split_model()
    table, tensors = model.axis_table(), named_tensors(model)
    keeps = {name: torch.ones(n, dtype=torch.bool) for name, n in table.widths(tensors).items()}
    keeps["D"][[2, 8]] = False
    decision = cascade(table, tensors, keeps)
    assert decision is not None
    assert decision.keeps["embedding.d_e"].tolist() == [True, True, False, *[True] * 5]
    silence_(model, {"D": keeps["D"]}, table)
    with torch.no_grad():
        before = model(TOKENS)
        cut_(model, table, decision.keeps, decision.removed)
        assert difference(model(TOKENS), before) < 1e-12


def test_the_price_of_a_site_has_the_column_that_goes_with_it_alone() -> None:
    whole, halves = (
        prices(m.axis_table(), ACCOUNTINGS["fma"], named_tensors(m))["D"]
        for m in (model_of(), split_model())
    )
    column = SPEC.inputs + 2  # the product, and the factors of both uses
    assert whole[2] - halves[2] - halves[8] == column
    assert halves[3] == whole[3]


@torch.no_grad()
def test_new_columns_have_one_site_for_both_uses() -> None:
    model = split_model()
    table, tensors = model.axis_table(), named_tensors(model)
    axis = table["embedding.d_e"]
    assert room(table, axis, tensors) == 0  # each use has a site that the other has not
    model = model_of()
    table, before = model.axis_table(), model(TOKENS)
    keeps = {name: torch.ones(n) > 0 for name, n in table.widths(named_tensors(model)).items()}
    keeps["embedding.d_e"][[1, 6]] = False
    cut_(model, table, keeps)
    table, tensors, before = model.axis_table(), named_tensors(model), model(TOKENS)
    assert room(table, table["embedding.d_e"], tensors) == 2
    generator = torch.Generator().manual_seed(0)
    swap_(model, grow(tensors, table, {"embedding.d_e": 2}, generator).tensors)
    assert difference(model(TOKENS), before) < 1e-12
    assert torch.equal(model.embedding.write.sites, model.classifier.read.sites)
    assert sorted(model.embedding.write.sites.tolist()) == list(range(8))
    swap_(model, grow(named_tensors(model), model.axis_table(), {"D": 1}, generator).tensors)
    model.axis_table().check(named_tensors(model))
    assert difference(model(TOKENS), before) < 1e-12
    assert model.embedding.write.sites[-1] == model.classifier.read.sites[-1] == 8


# --- a step -----------------------------------------------------------------------------------


def stepped(unseen: str, masked: bool) -> torch.Tensor:
    """How far the rows of the table move in steps on the first six tokens.

    With `masked` the loss has no other outputs than these, so that other rows have no gradient.
    """
    spec = replace(TIED, unseen_rows=unseen, eps=1e-5)
    options = CompressorOptions(solver="fixed", rho=1e-3, lr=0.01, interval=1000)
    model = Transformer(spec, seed=1)
    compressor = Compressor(model, 10.0, options)
    before = model.embedding.table.detach().clone()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        inputs = torch.randint(6, (4, 5), generator=generator)
        outputs = model(inputs).flatten(0, 1)[:, : 6 if masked else None]
        loss = F.cross_entropy(outputs, inputs.flip(1).flatten())
        loss.backward()
        compressor.step(loss)
    assert "embedding.table" not in model.axis_table().matrices
    return (model.embedding.table.detach() - before).abs().amax(1)


def test_rows_are_held_by_their_gradient_which_the_softmax_gives_to_all() -> None:
    everywhere = stepped("held", masked=False)
    assert (everywhere > 0).all()
    # All rows have a gradient, so that holding changes nothing.
    assert torch.equal(everywhere, stepped("pressed", masked=False))
    held = stepped("held", masked=True)
    assert (held[:6] > 0).all()
    assert not held[6:].any()
    assert (stepped("pressed", masked=True) > 0).all()
