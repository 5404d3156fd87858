"""The figures of the paper, and the real work of a small model counted by hand."""

import math
from dataclasses import replace

import pytest
import torch

from gaugelasso.axes import Axis, AxisTable, Cost, Slot, named_tensors
from gaugelasso.compress.memory import Memory
from gaugelasso.compress.pricing import ACCOUNTINGS, least_cost, total_fma
from gaugelasso.models import InputKind, Transformer, TransformerSpec
from gaugelasso.models.operators import Attention
from tests.contract.models import TRANSFORMERS, Case, make

TEXT = {"length": 512, "inputs": 256, "outputs": 256, "positions": True}
FACES = {
    "length": 256,
    "inputs": 192,
    "positions": True,
    "outputs": 192,
    "input_kind": "masked_patches",
    "causal": False,
    "rope": False,
    "heads": 8,
}
PAPER = {
    "FF31": (
        {"width": 192, "layers": 8, "heads": 8, "d_k": 48, "d_v": 48, "d_f": 2048}
        | {"length": 283, "inputs": 44, "outputs": 44, "positions": True},
        13_179_840,
    ),
    "char LM 12 layers": (
        TEXT | {"width": 576, "layers": 12, "heads": 6, "d_k": 96, "d_v": 96, "d_f": 1536},
        53_706_240,
    ),
    "char LM 6 layers": (
        TEXT | {"width": 288, "layers": 6, "heads": 6, "d_k": 48, "d_v": 48, "d_f": 768},
        7_602_336,
    ),
    "char LM 24 layers": (
        TEXT | {"width": 480, "layers": 24, "heads": 8, "d_k": 90, "d_v": 90, "d_f": 1920},
        113_351_040,
    ),
    "retrieval": (
        {"width": 128, "layers": 4, "heads": 4, "d_k": 32, "d_v": 32, "d_f": 256}
        | {"length": 192, "inputs": 4096, "outputs": 4097, "positions": True},
        1_878_656,
    ),
    "CelebA d_k 96": (
        FACES | {"width": 768, "layers": 12, "d_k": 96, "d_v": 96, "d_f": 2048},
        90_183_168,
    ),
    "CelebA d_k 256": (
        FACES | {"width": 768, "layers": 12, "d_k": 256, "d_v": 256, "d_f": 2048},
        145_233_408,
    ),
    "CelebA baseline": (
        FACES | {"width": 384, "layers": 6, "d_k": 48, "d_v": 48, "d_f": 1024},
        12_052_224,
    ),
}


@pytest.mark.parametrize("name", PAPER)
def test_paper_accounting_gives_the_paper_s_figure(name: str) -> None:
    settings, figure = PAPER[name]
    with torch.device("meta"):
        model = Transformer(TransformerSpec.uniform(**settings))
    assert total_fma(model.axis_table(), ACCOUNTINGS["paper"], named_tensors(model)) == figure


SMALL = {
    "width": 4,
    "layers": 1,
    "heads": 2,
    "d_k": 6,
    "d_v": 5,
    "d_f": 7,
    "length": 9,
    "inputs": 11,
    "outputs": 3,
}
# gain, W_q W_k W_v, W_o, delta
ATTENTION = 4 + 4 * 2 * (6 + 6 + 5) + 2 * 5 * 4 + 4
MLP = 4 + 3 * 4 * 7 + 4
CLASSIFIER = 4 + 4 * 3


@pytest.mark.parametrize(
    ("settings", "work"),
    [
        # A query sees 1, 2, ..., 9 keys: 5 on average.
        ({"causal": True}, 4 + ATTENTION + 2 * 5 * (6 + 5) + MLP + CLASSIFIER),
        ({"causal": False}, 4 + ATTENTION + 2 * 9 * (6 + 5) + MLP + CLASSIFIER),
        # Without RoPE the same channels do the same work; positions are looked up.
        ({"rope": False, "positions": True}, 4 + ATTENTION + 2 * 5 * (6 + 5) + MLP + CLASSIFIER),
        # One key and value head for both query heads: 4 * (6 + 5) less to project.
        ({"kv_heads": 1}, 4 + ATTENTION - 44 + 2 * 5 * (6 + 5) + MLP + CLASSIFIER),
        # Patches are multiplied, not looked up.
        (
            {"input_kind": "patches"},
            11 * 4 + 4 + ATTENTION + 2 * 5 * (6 + 5) + MLP + CLASSIFIER,
        ),
        # A hidden patch takes its token without work.
        (
            {"input_kind": "masked_patches"},
            11 * 4 + 4 + ATTENTION + 2 * 5 * (6 + 5) + MLP + CLASSIFIER,
        ),
    ],
    ids=["causal", "full", "no rope", "grouped keys", "patches", "masked patches"],
)
def test_fma_accounting_counts_the_work_done(settings: dict, work: float) -> None:
    model = Transformer(TransformerSpec.uniform(**SMALL | settings))
    assert total_fma(model.axis_table(), ACCOUNTINGS["fma"], named_tensors(model)) == work


@pytest.mark.parametrize(
    ("kind", "tied"), [("tokens", False), ("patches", False), ("tokens", True)]
)
def test_the_least_cost_is_that_of_the_smallest_model(kind: InputKind, tied: bool) -> None:
    """Without operators, and with one channel: nothing smaller can be left over."""
    settings: dict = SMALL | {"inputs": 3, "input_kind": kind}
    model, smallest = (
        Transformer(replace(TransformerSpec.uniform(**settings | size), tied_head=tied))
        for size in ({}, {"width": 1})
    )
    for name in [*smallest.operators]:
        smallest.remove_operator(f"operators.{name}")
    for accounting in ACCOUNTINGS.values():
        least = least_cost(model.axis_table(), accounting, named_tensors(model))
        assert least == total_fma(smallest.axis_table(), accounting, named_tensors(smallest))
    # Of bytes a lower bound: those of parts that no axis reaches do not count.
    left = total_fma(smallest.axis_table(), Memory(), named_tensors(smallest))
    assert 0 < least_cost(model.axis_table(), Memory(), named_tensors(model)) <= left


def test_work_without_axes_counts_where_all_must_stay() -> None:
    fixed, own = Cost("matmul", 40, ()), Cost("matmul", 3, ("hidden",))
    hidden = Axis("hidden", "hidden", (Slot("up", 1),), (Slot("down", 0),), owner="mlp")
    table = AxisTable((hidden,), (), matrices={}, costs=(fixed, own))
    for required, least in ((frozenset[str](), 0), (frozenset({"mlp"}), 43)):
        stays = replace(table, required=required)
        assert least_cost(stays, ACCOUNTINGS["fma"], {}) == least


def attentions(model: Transformer) -> list[Attention]:
    return [part for part in model.operators.values() if isinstance(part, Attention)]


def counted_parameters(model: Transformer) -> int:
    """All but the token of hidden patches, which the paper's figures leave out, and biases.

    A bias is added, not multiplied. Gains of norms of heads count once for each channel of a head.
    """
    token = model.embedding.table[model.initial_spec.inputs :].numel()
    named = model.named_parameters()
    counted = (p for name, p in named if not name.endswith("bias") and "_norm." not in name)
    normed = sum(
        part.query[0].numel() + part.key[0].numel()
        for part in attentions(model)
        if part.head_norms()
    )
    return sum(parameter.numel() for parameter in counted) - token + normed


@pytest.mark.parametrize("case", TRANSFORMERS, ids=str)
def test_paper_accounting_is_every_parameter_and_attention(case: Case) -> None:
    model = make(case)
    work = counted_parameters(model)
    for part in attentions(model):
        heads, keys, values = part.query.shape[1], part.query.shape[-1], part.value.shape[-1]
        seen = min(model.initial_spec.length, part.window or math.inf)
        work += heads * seen * (keys + values) + heads * keys * part.rope
    assert total_fma(model.axis_table(), ACCOUNTINGS["paper"], named_tensors(model)) == work


@pytest.mark.parametrize("case", TRANSFORMERS, ids=str)
def test_fma_accounting_is_every_multiplied_parameter_and_visible_keys(case: Case) -> None:
    model = make(case)
    work = counted_parameters(model)
    if model.embedding.tokens and not model.initial_spec.tied_head:
        work -= model.embedding.table.numel()
    if model.embedding.positions is not None:
        work -= model.embedding.positions.numel()
    length = model.initial_spec.length
    for part in attentions(model):
        positions = range(1, length + 1) if model.initial_spec.causal else [length] * length
        visible = sum(min(each, part.window or length) for each in positions) / length
        heads, values = part.query.shape[1], part.value.shape[-1]
        work += heads * visible * (part.query[0, 0].numel() + values)
    assert total_fma(model.axis_table(), ACCOUNTINGS["fma"], named_tensors(model)) == work
