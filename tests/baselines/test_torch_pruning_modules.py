"""Torch-Pruning: plain modules, what the package removes, and its regularisation."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gaugelasso.baselines.torch_pruning_choice import (
    GroupNormRegularizer,
    Mode,
    PackageChoice,
    PrunerOptions,
    RankingScope,
)
from gaugelasso.baselines.torch_pruning_modules import plain_of
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.drop import cascade
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer, TransformerSpec

# Heads that share keys, with RoPE; one key for each head, without; patches and a tied normaliser;
# a tied head.
SHAPES: list[dict[str, Any]] = [
    {"kv_heads": 2},
    {"kv_heads": 4, "rope": False, "positions": True},
    {
        "input_kind": "masked_patches",
        "positions": True,
        "causal": False,
        "norm": "tied",
        "eps": 0.1,
    },
    {"kv_heads": 2, "tied_head": True},
]


def model_of(shape: dict[str, Any]) -> Transformer:
    """A small model with weights, gains, scales and normalisers that are all different."""
    shape = dict(shape)
    also = {"tied_head": shape.pop("tied_head", False)}
    spec = TransformerSpec.uniform(
        width=8, layers=2, heads=4, d_k=4, d_v=3, d_f=6, length=6, inputs=8, outputs=8, **shape
    )
    model = Transformer(replace(spec, **also), seed=1).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.ndim == 1 and len(tensor) == 8:
                tensor.mul_(0.5 + torch.rand(8, generator=generator, dtype=torch.float64))
    return model


def inputs_of(model: Transformer) -> Tensor:
    if model.embedding.tokens:
        return torch.arange(12).view(2, 6) % 8
    return torch.linspace(-1, 1, 2 * 6 * 9, dtype=torch.float64).view(2, 6, 9)


def compressor_of(model: Transformer) -> Compressor:
    return Compressor(model, 0.0, CompressorOptions(solver="fixed"))


# --- plain modules --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_modules_have_the_outputs_of_the_model(shape: dict[str, Any]) -> None:
    model = model_of(shape)
    inputs = inputs_of(model)
    torch.testing.assert_close(plain_of(model)(inputs), model(inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("attention_bias", True, "attention_bias = true"),
        ("write_bias", True, "write_bias = true"),
        ("head_bias", True, "head_bias = true"),
        ("tied_mean", True, "tied_mean = true"),
        ("mlp", "gelu", "mlp = 'gelu'"),
        ("qk_norm", True, "qk_norm = true"),
        ("window", 2, "a sliding window"),
        ("post_norm", True, "post_norm = true"),
    ],
)
def test_what_plain_modules_lack_is_refused(key: str, value: Any, named: str) -> None:
    spec = model_of(SHAPES[0]).spec()
    if key == "window":
        key, value = "operators", (replace(spec.operators[0], window=2), *spec.operators[1:])
    if key == "tied_mean":
        spec = replace(spec, outputs=spec.inputs, tied_head=True)
    causal = spec.causal and key != "post_norm"
    spec = replace(spec, **{"causal": causal, key: value})
    with pytest.raises(UserError, match=named):
        plain_of(Transformer(spec))


def test_also_those_of_a_model_whose_operators_read_and_write_some_sites() -> None:
    model = model_of({})
    state = compressor_of(model).state
    keeps = {name: torch.ones(size, dtype=torch.bool) for name, size in state.widths().items()}
    keeps["D"][3] = False
    keeps["operators.attention_0.d_ai"][[1, 5]] = False
    keeps["operators.mlp_1.d_mo"][[0, 2]] = False
    keeps["classifier.d_c"][7] = False
    decision = cascade(state.table, state.readable(), keeps)
    assert decision is not None
    state.cut_(decision, "in a test")
    assert model.operators["attention_0"].query.shape[0] < len(model.sites) == 7
    inputs = inputs_of(model)
    torch.testing.assert_close(plain_of(model)(inputs), model(inputs), rtol=1e-12, atol=1e-12)


# --- what the package removes ---------------------------------------------------------------


# Every shape in one ranking, and every ranking of one shape: neither knows of the other.
@pytest.mark.parametrize(
    ("shape", "mode", "ranking"),
    [(shape, "magnitude", "global") for shape in SHAPES]
    + [(SHAPES[0], "group-norm", "local"), (SHAPES[0], "magnitude", "isomorphic")],
)
def test_our_cut_is_the_model_that_the_package_has_pruned(
    shape: dict[str, Any], mode: Mode, ranking: RankingScope
) -> None:
    model = model_of(shape)
    state = compressor_of(model).state
    full, target = state.fma, 0.4 * state.fma
    choice = PackageChoice(state, PrunerOptions(mode, ranking, reg=1e-4))
    decision = choice.to_work(target)
    work, inputs = state.work_after(decision), inputs_of(model)
    assert 0.7 * target < work <= target
    kinds = {name.rpartition(".")[2] for name in decision.dropped()}
    assert {"D", "d_k", "d_v", "d_f"} <= kinds
    state.cut_(decision, "in a test")
    assert state.fma == work < full
    torch.testing.assert_close(choice.plain(inputs), model(inputs), rtol=1e-12, atol=1e-12)
    assert Transformer(model.spec()).spec() == model.spec()


def test_the_weakest_filters_go_first() -> None:
    model = model_of({})
    mlp = model.operators["mlp_0"]
    with torch.no_grad():
        for leaf in (mlp.up.T, mlp.gate.T, mlp.down):
            leaf[[1, 4]] *= 1e-3
    state = compressor_of(model).state
    decision = PackageChoice(state, PrunerOptions("magnitude", "global", 0.0)).to_work(
        state.fma - 1
    )
    gone = (~decision.keeps["operators.mlp_0.d_f"]).nonzero().view(-1).tolist()
    assert gone
    assert set(gone) <= {1, 4}
    assert decision.dropped() == {"operators.mlp_0.d_f": len(gone)}


def test_a_work_that_it_cannot_reach_leaves_one_index_of_each_axis() -> None:
    model = model_of({})
    state = compressor_of(model).state
    state.cut_(PackageChoice(state, PrunerOptions("magnitude", "global", 0.0)).to_work(1), "here")
    assert set(state.widths().values()) == {1}
    assert len(model.operators) == 4


# --- regularisation -------------------------------------------------------------------------


def gradients_of(model: Transformer) -> dict[str, Tensor]:
    options = PrunerOptions("group-norm", "global", reg=0.5)
    return GroupNormRegularizer(model, options).gradients(model)


def test_regularisation_is_stronger_for_weaker_channels_of_both_axes_of_a_map() -> None:
    """gradient = reg (a_site + b_filter) weight, where a and b are from 1 to 16."""
    model = Transformer(model_of({}).spec(), seed=3).double()  # gains and scales are one
    found = gradients_of(model)
    mlp = model.operators["mlp_1"]
    ratio = (found["operators.mlp_1.up"] / mlp.up.detach()) / 0.5
    by_filter = ratio - ratio[:, :1]
    torch.testing.assert_close(by_filter, by_filter[:1].expand_as(ratio))
    assert float(by_filter[0].max() - by_filter[0].min()) == pytest.approx(15)
    sites = ratio[:, 0] - by_filter[0, 0] - ratio.min() + 2
    assert float(sites.max() - sites.min()) == pytest.approx(15)
    assert float(ratio.min()) >= 2
    strength = mlp.up.square().sum(0) + mlp.gate.square().sum(0) + mlp.down.square().sum(1)
    assert int(by_filter[0].argmax()) == int(strength.argmin())
    assert "embedding.table" not in found


def test_gains_and_scales_get_their_part_of_it() -> None:
    """A map is gain x matrix: both have the same sum of weight times gradient."""
    model = model_of({}).train()
    products = {
        name: model.get_parameter(name) * gradient for name, gradient in gradients_of(model).items()
    }
    owner = "operators.mlp_0"
    matrices = (products[f"{owner}.up"] + products[f"{owner}.gate"]).sum(1)
    torch.testing.assert_close(products[f"{owner}.read.gain"], matrices)
    torch.testing.assert_close(products[f"{owner}.write.scale"], products[f"{owner}.down"].sum(0))
    assert matrices.detach().abs().min() > 0
