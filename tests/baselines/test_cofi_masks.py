"""CoFi: masks, the control of their cost, and the dense cut."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call

from gaugelasso.axes import named_tensors
from gaugelasso.baselines.cofi import MASK_BOUND, parameters
from gaugelasso.baselines.cofi_cost import parameter_terms, row_products
from gaugelasso.baselines.cofi_cut import make_dense_
from gaugelasso.baselines.cofi_masks import Masks
from gaugelasso.baselines.cofi_run import teacher_of
from gaugelasso.baselines.cofi_step import CofiDistillation
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer, TransformerSpec
from tests.export.sources import tiny, write_run


def model_of(norm: str = "slow", kv_heads: int = 2, **also: bool) -> Transformer:
    spec = TransformerSpec.uniform(
        width=8, layers=2, heads=4, kv_heads=kv_heads, d_k=4, d_v=4, d_f=6, length=6, inputs=8,
        outputs=8, norm=norm,
    )  # fmt: skip
    model = Transformer(replace(spec, **also), seed=1).double()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            torch.nn.init.normal_(parameter, generator=generator)
    return model


def masks_of(
    model: Transformer, objective: str = "fma", rate: float = 0.05, bound: float = MASK_BOUND
) -> tuple[Compressor, Masks]:
    compressor = Compressor(model, 0.0, CompressorOptions(solver="fixed"))
    state = compressor.state
    terms: Any = state.plan.terms
    if objective == "parameters":
        terms = parameter_terms(state.table, named_tensors(model))
    return compressor, Masks(model, terms, rate, 0, bound)


def set_(masks: Masks, closed: dict[str, list[int]], owner: str = "") -> None:
    """Open all masks but these, family -> positions in its parts of this owner."""
    with torch.no_grad():
        masks.logits.fill_(20.0)
        for part in masks.parts:
            if part.family in closed and owner in part.owner:
                part.of(masks.logits)[closed[part.family]] = -20.0


INPUTS = torch.arange(12).view(2, 6) % 8


@pytest.mark.parametrize(
    ("also", "named"),
    [
        ({"write_bias": True}, "write_bias = true"),
        ({"mlp": "gelu"}, "mlp = 'gelu'"),
        ({"post_norm": True, "causal": False}, "post_norm = true"),
    ],
)
def test_models_that_the_masks_do_not_fit_are_refused(
    also: dict[str, Any], named: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", tiny(1, also))
    with pytest.raises(UserError, match=named):
        teacher_of(run)


# --- masks ----------------------------------------------------------------------------------


def test_a_mask_is_open_as_often_as_its_probability_says() -> None:
    _, masks = masks_of(model_of())
    with torch.no_grad():
        masks.logits.copy_(torch.linspace(-3, 3, len(masks.logits)))
    drawn = torch.stack([masks.sample(masks.noise(seed)) for seed in range(1000)])
    assert torch.equal(drawn[0], masks.sample(masks.noise(0)))
    assert drawn.min() == 0
    assert drawn.max() == 1
    torch.testing.assert_close(
        (drawn > 0).float().mean(0), masks.open_probability().detach(), atol=0.06, rtol=0
    )
    zeros, chance = masks.deterministic() == 0, masks.open_probability().detach()
    for part in masks.parts:
        expected = part.size - float(part.of(chance).sum())
        assert int(part.of(zeros).sum()) == round(expected)


def test_open_masks_change_nothing_and_cost_all() -> None:
    model = model_of()
    for objective, full in (("fma", None), ("parameters", parameters(model))):
        compressor, masks = masks_of(model, objective)
        set_(masks, {})
        assert masks.full == pytest.approx(full or compressor.fma)
        assert float(masks.expected().detach()) == pytest.approx(masks.full, rel=1e-4)
    gated = masks.gated(model, torch.ones(len(masks.logits)))
    assert torch.equal(functional_call(model, gated, (INPUTS,)), model(INPUTS))
    every = sum(p.numel() for p in model.parameters())
    tables = model.embedding.table.numel() + (
        0 if model.embedding.positions is None else model.embedding.positions.numel()
    )
    assert parameters(model) == every - tables


@pytest.mark.parametrize(
    ("norm", "also", "kv_heads"),
    [
        ("slow", None, 2),
        ("slow", None, 4),
        ("tied", None, 2),
        ("slow", "attention_bias", 2),
        ("slow", "qk_norm", 4),
        ("slow", "tied_head", 2),
    ],
)
@pytest.mark.parametrize(
    ("closed", "owner"),
    [
        ({"head": [0]}, "attention_1"),
        ({"mha": [0]}, "attention_0"),
        ({"ffn": [0]}, "mlp_1"),
        ({"intermediate": [1, 4]}, "mlp"),
        ({"hidden": [2, 3]}, ""),
        ({"hidden": [0], "head": [1], "intermediate": [0, 5]}, ""),
    ],
)
def test_the_dense_model_is_the_masked_one(
    norm: str, also: str | None, kv_heads: int, closed: dict[str, list[int]], owner: str
) -> None:
    model = model_of(norm, kv_heads, **({also: True} if also else {}))
    compressor, masks = masks_of(model)
    set_(masks, closed, owner)
    before = compressor.fma
    with masks.applied(model):
        wanted = model.eval()(INPUTS)
    expected = float(masks.expected().detach())
    make_dense_(compressor.state, masks)
    torch.testing.assert_close(model.eval()(INPUTS), wanted)
    assert compressor.fma < before
    # What the cascade and the scales of a removed block save is not in the expectation.
    assert compressor.fma == pytest.approx(expected, rel=0.05)
    assert compressor.fma <= expected * 1.001
    # The optimizer and the structure follow.
    assert Transformer(model.spec()).spec() == model.spec()
    model.train()
    compressor.step(lambda: model(INPUTS).square().mean())


def test_the_control_brings_the_cost_to_its_target() -> None:
    _, masks = masks_of(model_of(), rate=0.1)
    target = 0.5 * masks.full
    for _ in range(250):
        masks.lagrangian(target).backward()
        masks.step_()
    assert float(masks.expected().detach()) == pytest.approx(target, rel=0.1)
    assert float(masks.multipliers[1].detach()) > 0


def test_multipliers_rise_by_their_rate_while_the_cost_is_above() -> None:
    _, masks = masks_of(model_of())
    for _ in range(10):
        masks.lagrangian(0.01 * masks.full).backward()
        masks.step_()
    assert masks.multipliers.tolist() == pytest.approx([0.5, 0.5], rel=1e-2)


def test_a_closed_mask_is_still_drawn_open_and_opens_again() -> None:
    """As in the authors' code: without a bound a mask that is pressed for long stays shut."""
    _, masks = masks_of(model_of(), rate=0.1)

    def below_one() -> float:
        drawn = torch.stack([masks.sample(masks.noise(seed)) for seed in range(200)])
        return float((drawn < 1).float().mean())

    for sign in (1.0, -1.0):  # of the gradient, as where cost, and then the task's loss, decide
        for _ in range(400):
            masks.logits.grad.fill_(sign)
            masks.step_()
        assert masks.logits.tolist() == pytest.approx([-sign * MASK_BOUND] * len(masks.logits))
        low, high = (0.98, 0.999) if sign > 0 else (0.02, 0.1)
        assert low < below_one() < high


def test_without_a_bound_an_open_mask_stays_where_it_is() -> None:
    _, masks = masks_of(model_of(), bound=math.inf)
    masks.step_()
    assert float(masks.logits.detach().max()) == pytest.approx(10, abs=0.05)


def test_masks_go_on_from_their_state() -> None:
    (_, one), (_, other) = masks_of(model_of()), masks_of(model_of())
    for number in range(6):
        if number == 3:
            other.load_(one.state())
        for masks in (one, other)[: 1 + (number >= 3)]:
            masks.lagrangian(0.3 * masks.full).backward()
            masks.step_()
    assert torch.equal(one.logits, other.logits)
    assert torch.equal(one.multipliers, other.multipliers)
    with pytest.raises(ValueError, match="numbers of masks in place of"):
        other.load_([0.0])


def test_products_of_rows_are_those_of_prod_and_survive_zeros() -> None:
    rows = torch.rand(50, 4, generator=torch.Generator().manual_seed(1)) + 0.1
    given = torch.linspace(-1, 1, 50)
    found = []
    for product in (row_products, lambda values: values.prod(1)):
        values = rows.clone().requires_grad_()
        result = product(values)
        result.backward(given)
        found.append((result.detach(), values.grad))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    closed = torch.tensor([[0.0, 2.0, 3.0]], requires_grad=True)
    row_products(closed).sum().backward()
    assert torch.equal(closed.grad, torch.zeros(1, 3))


def test_logits_of_any_size_have_finite_gradients() -> None:
    _, masks = masks_of(model_of())
    with torch.no_grad():
        masks.logits.fill_(-200)  # whose sigmoid is zero
        masks.multipliers.fill_(1.0)
    assert float(masks.expected().detach()) == 0
    masks.lagrangian(0.5 * masks.full).backward()
    assert not masks.logits.grad.any()


def test_distillation_is_the_divergence_at_temperature_2_or_the_squared_error() -> None:
    model = model_of()
    wanted = model(INPUTS).detach()
    outputs = wanted + torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3))
    p, q = (values.float().div(2).softmax(-1) for values in (wanted, outputs))
    divergence = 4 * (p * (p / q).log()).sum(-1).mean()
    for logits, expected in ((True, divergence), (False, (outputs - wanted).square().mean())):
        taught = CofiDistillation(model, 0.5, logits)
        assert float(taught.loss(wanted, wanted)) == pytest.approx(0, abs=1e-6)
        assert float(taught.loss(outputs, wanted)) == pytest.approx(float(expected), rel=1e-5)


def test_no_masks_cost_less_than_one_site_without_blocks() -> None:
    for objective in ("fma", "parameters"):
        model = model_of()
        compressor, masks = masks_of(model, objective)
        every: dict[str, Any] = {"mha": [0], "ffn": [0], "hidden": list(range(1, 8))}
        set_(masks, every)
        assert float(masks.expected().detach()) < 2 * masks.least
        make_dense_(compressor.state, masks)
        assert (len(model.operators), len(model.sites)) == (0, 1)
        reached = compressor.fma if objective == "fma" else parameters(model)
        assert reached == pytest.approx(masks.least)


def test_deterministic_masks_are_on_the_model_within_their_context_only() -> None:
    model = model_of()
    _, masks = masks_of(model)
    set_(masks, {"intermediate": [1, 4]}, "mlp_0")
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    with masks.applied(model):
        assert not model.operators["mlp_0"].down[[1, 4]].any()
    after = named_tensors(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
