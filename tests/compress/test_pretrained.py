"""What protects pretrained weights: held rows, an elementwise head, slow norms that pause."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso.axes import AxisError, named_tensors
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.compress.defaults import MOST_PRETRAINED_LR, chosen_options
from gaugelasso.compress.options import RunOptions
from gaugelasso.errors import UserError
from gaugelasso.importing.pretrained import for_pretrained
from gaugelasso.models import SpecError, Transformer, TransformerSpec
from tests.contract.models import PRETRAINED

VOCABULARY, SEEN = 11, 6
SPEC = TransformerSpec.uniform(
    width=8, layers=1, heads=2, d_k=4, d_v=4, d_f=12, length=5, inputs=VOCABULARY,
    outputs=VOCABULARY, eps=1e-5,
)  # fmt: skip
# No event within a test: a balance rescales columns of the table, also of rows that are held.
OPTIONS: dict[str, Any] = {"solver": "fixed", "rho": 1e-3, "lr": 0.01, "interval": 1000}


def compressed(options: dict[str, Any] | None = None, **treatment: str) -> Compressor:
    model = Transformer(replace(SPEC, **treatment), seed=1)
    return Compressor(model, 10.0, CompressorOptions(**OPTIONS | (options or {})))


def train_(compressor: Compressor, steps: int, tokens: int = SEEN) -> None:
    """Steps on batches that use the first tokens of the vocabulary alone."""
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        inputs = torch.randint(tokens, (4, 5), generator=generator)
        logits = compressor.model(inputs).flatten(0, 1)
        loss = F.cross_entropy(logits, inputs.flip(1).flatten())
        loss.backward()
        compressor.step(loss)


def table_of(compressor: Compressor) -> Tensor:
    return named_tensors(compressor.model)["embedding.table"].detach().clone()


# --- rows that a batch does not use --------------------------------------------------------


def test_rows_without_gradient_are_held() -> None:
    held, pressed = compressed(unseen_rows="held"), compressed()
    for compressor in (held, pressed):
        before = table_of(compressor)
        train_(compressor, 3)
        moved = (table_of(compressor) - before).abs().amax(1)
        assert (moved[:SEEN] > 0).all()
        assert (moved[SEEN:] > 0).all() == (compressor is pressed)
    # By a whole learning rate at every step, up to the bound of a relative step.
    assert float(moved[SEEN:].max()) > 0.01


def test_a_row_that_is_used_again_is_pressed_again() -> None:
    compressor = compressed(unseen_rows="held")
    train_(compressor, 2)
    before = table_of(compressor)
    train_(compressor, 2, tokens=VOCABULARY)
    assert ((table_of(compressor) - before)[SEEN:].abs().amax(1) > 0).all()


def test_rho_counts_what_is_pressed() -> None:
    """Rows that are held do not oppose descent."""
    options = {"solver": "conservative"}
    held, pressed = compressed(options, unseen_rows="held"), compressed(options)
    for compressor in (held, pressed):
        train_(compressor, 1)
    assert float(held.rho) > float(pressed.rho) > 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("embedding.tables", "no tensor 'embedding.tables'"),
        ("embedding.write.scale", "is not a trained table"),
        ("sites", "is not a trained table"),
        ("classifier.out", "in matrices too"),
    ],
)
def test_a_wrong_lookup_is_named(name: str, reason: str) -> None:
    model = Transformer(SPEC)
    table = replace(model.axis_table(), lookups=(name,))
    with pytest.raises(AxisError, match=f"lookups: .*{reason}"):
        table.check(named_tensors(model))


# --- the head ------------------------------------------------------------------------------


def test_the_head_may_take_the_elementwise_step() -> None:
    """The step of the optimizer that steps everything so; the other matrices stay with Muon."""
    mixed = compressed(head_step="elementwise")
    muon, adam = compressed(), compressed({"optimizer": "adam"})
    for compressor in (mixed, muon, adam):
        train_(compressor, 1)
    after = [named_tensors(compressor.model) for compressor in (mixed, muon, adam)]
    assert torch.equal(after[0]["classifier.out"], after[2]["classifier.out"])
    assert not torch.equal(after[0]["classifier.out"], after[1]["classifier.out"])
    assert torch.equal(after[0]["operators.mlp_0.up"], after[1]["operators.mlp_0.up"])
    assert not torch.equal(after[0]["operators.mlp_0.up"], after[2]["operators.mlp_0.up"])


# --- slow norms ----------------------------------------------------------------------------


@pytest.mark.parametrize("energy", ["batch", "token"])
def test_slow_norms_pause_with_the_pressure(energy: str) -> None:
    compressor = compressed(norm_energy=energy)
    weight = named_tensors(compressor.model)["classifier.read.weight"]
    train_(compressor, 2)
    begun = weight.clone()
    assert not torch.equal(begun, torch.full_like(begun, 1 / len(begun)))
    compressor.set_pressure_(0.0)
    train_(compressor, 3)
    assert torch.equal(weight, begun) == (energy == "token")
    compressor.set_pressure_(1.0)
    train_(compressor, 1)
    assert not torch.equal(weight, begun)


# --- the structure -------------------------------------------------------------------------


def test_the_treatment_survives_the_structure() -> None:
    model = Transformer(replace(SPEC, **PRETRAINED))
    structure = model.structure()
    assert {key: structure[key] for key in PRETRAINED} == PRETRAINED
    again = Transformer.from_structure(structure).axis_table()
    assert again == model.axis_table()
    assert again.lookups == ("embedding.table",)
    assert "classifier.out" not in again.matrices
    assert all(norm.by_token for norm in again.norms)


def test_structures_without_it_are_as_before() -> None:
    structure = Transformer(SPEC).structure()
    assert not PRETRAINED.keys() & structure.keys()
    table = Transformer.from_structure(structure).axis_table()
    assert not table.lookups
    assert "classifier.out" in table.matrices
    assert not any(norm.by_token for norm in table.norms)


@pytest.mark.parametrize("key", PRETRAINED)
def test_an_unknown_treatment_is_named(key: str) -> None:
    with pytest.raises(SpecError, match=f"{key} = 'other': choose one of: "):
        replace(SPEC, **{key: "other"})
    with pytest.raises(SpecError, match=f"structure: {key} = 'other' is not"):
        TransformerSpec.from_dict(SPEC.to_dict() | {key: "other"})


@pytest.mark.parametrize(("outputs", "step"), [(VOCABULARY, "matrix"), (49_152, "elementwise")])
def test_import_protects_what_it_imports(outputs: int, step: str) -> None:
    spec = for_pretrained(replace(SPEC, outputs=outputs))
    assert spec == replace(SPEC, outputs=outputs, **PRETRAINED | {"head_step": step})


def test_a_loop_of_ones_own_has_the_defaults_of_pretrained_weights() -> None:
    spec = TransformerSpec.uniform(
        inputs=9, outputs=9, length=8, width=16, layers=1, heads=2, d_k=4, d_v=4, d_f=8
    )
    fresh, imported = (Transformer(each) for each in (spec, for_pretrained(spec)))
    assert (fresh.is_pretrained, imported.is_pretrained) == (False, True)
    assert Transformer(imported.spec()).is_pretrained  # the structure keeps it

    def options(model: Transformer, **given: Any) -> RunOptions:
        return chosen_options(CompressorOptions(**given), model, 400)

    assert (options(fresh).removal, options(fresh).lr) == ("pressure", 3e-3)
    assert (options(imported).removal, options(imported).lr) == ("harm", MOST_PRETRAINED_LR)
    assert options(imported, removal="pressure", lr=0.01).removal == "pressure"
    assert options(imported, lr=0.01).lr == 0.01
    assert options(imported, exchange=50).removal == "pressure"
    assert chosen_options(CompressorOptions(), imported, 0) == RunOptions()  # no course
    with pytest.raises(UserError, match=r"compress\.removal = None"):
        RunOptions(removal=None)  # type: ignore[arg-type]
