"""What the going of indices takes along."""

import pytest
import torch

from gaugelasso.axes import named_tensors
from gaugelasso.compress.drop import (
    Decision,
    cascade,
)
from gaugelasso.compress.surgery import cut_
from gaugelasso.models import AttentionSpec, MlpSpec, Transformer, TransformerSpec
from tests.compress.decisions import kept, uniform


def relay() -> Transformer:
    """Site 0 feeds attention, which feeds site 2, which feeds the MLP; site 1 goes straight on.

    embedding -> 0, 1;  attention 0 -> 2;  mlp 2 -> 1;  classifier reads 1.
    """
    attention = AttentionSpec(
        0, reads=(0,), writes=(2,), heads=1, kv_heads=1, keys=2, values=2, scale=1.0
    )
    return Transformer(
        TransformerSpec(
            sites=(0, 1, 2),
            length=4,
            layers=1,
            inputs=5,
            outputs=3,
            embed=(0, 1),
            classify=(1,),
            operators=(attention, MlpSpec(0, reads=(2,), writes=(1,), filters=3)),
        )
    )


def decide(model: Transformer, **gone: list[int] | str) -> Decision | None:
    """The cascade after losing these indices ("all": every one); `__` stands for a dot."""
    table, tensors = model.axis_table(), named_tensors(model)
    keeps = {name: torch.ones(n, dtype=torch.bool) for name, n in table.widths(tensors).items()}
    for name, indices in gone.items():
        name = name.replace("__", ".")
        name = name if name in keeps else f"operators.{name}"
        keeps[name][slice(None) if indices == "all" else indices] = False
    return cascade(table, tensors, keeps)


@pytest.mark.parametrize("model", [uniform(), relay()], ids=["uniform", "relay"])
def test_nothing_lost_nothing_taken(model: Transformer) -> None:
    decision = decide(model)
    assert decision is not None
    assert decision.dropped() == {}
    assert decision.removed == ()


def test_some_inner_indices_take_nothing_along() -> None:
    decision = decide(uniform(), attention_0__d_v=[1], mlp_0__d_f=[0, 2])
    assert decision is not None
    assert decision.dropped() == {"operators.attention_0.d_v": 1, "operators.mlp_0.d_f": 2}
    assert decision.removed == ()


@pytest.mark.parametrize("axis", ["d_ai", "d_k", "d_v", "d_ao"])
def test_an_empty_axis_removes_its_operator(axis: str) -> None:
    decision = decide(uniform(), **{f"attention_0__{axis}": "all"})
    assert decision is not None
    assert decision.removed == ("operators.attention_0",)
    for name, keep in decision.keeps.items():
        assert bool(keep.any()) != name.startswith("operators.attention_0.")


def test_a_site_takes_its_positions_along() -> None:
    decision = decide(uniform(), D=[1])
    for axis in ("embedding.d_e", "operators.attention_0.d_ai", "operators.mlp_0.d_mo"):
        assert kept(decision, axis) == [0, 2]
    assert kept(decision, "classifier.d_c") == [0, 2]


def test_a_site_without_writer_goes() -> None:
    decision = decide(uniform(), embedding__d_e=[2], attention_0__d_ao=[2], mlp_0__d_mo=[2])
    assert kept(decision, "D") == [0, 1]
    assert kept(decision, "classifier.d_c") == [0, 1]


def test_a_site_without_reader_goes() -> None:
    decision = decide(uniform(), attention_0__d_ai=[0], mlp_0__d_mi=[0], classifier__d_c=[0])
    assert kept(decision, "D") == [1, 2]
    assert kept(decision, "embedding.d_e") == [1, 2]


def test_one_writer_and_one_reader_hold_a_site() -> None:
    decision = decide(uniform(), embedding__d_e=[0], mlp_0__d_mo=[0], classifier__d_c=[0])
    assert kept(decision, "D") == [0, 1, 2]
    assert kept(decision, "operators.attention_0.d_ao") == [0, 1, 2]
    assert kept(decision, "operators.mlp_0.d_mi") == [0, 1, 2]


def test_what_is_written_after_the_last_reading_goes() -> None:
    """Site 0 is read by attention alone: what attention and MLP write there is for nobody."""
    decision = decide(uniform(), mlp_0__d_mi=[0], classifier__d_c=[0])
    assert kept(decision, "D") == [0, 1, 2]
    assert kept(decision, "embedding.d_e") == [0, 1, 2]
    assert kept(decision, "operators.attention_0.d_ai") == [0, 1, 2]
    assert kept(decision, "operators.attention_0.d_ao") == [1, 2]
    assert kept(decision, "operators.mlp_0.d_mo") == [1, 2]


def test_what_is_read_before_the_first_writing_goes() -> None:
    """Site 0 is written by the MLP alone: before it there is nothing to read."""
    decision = decide(uniform(), embedding__d_e=[0], attention_0__d_ao=[0])
    assert kept(decision, "D") == [0, 1, 2]
    assert kept(decision, "operators.attention_0.d_ai") == [1, 2]
    assert kept(decision, "operators.mlp_0.d_mi") == [1, 2]
    assert kept(decision, "operators.mlp_0.d_mo") == [0, 1, 2]
    assert kept(decision, "classifier.d_c") == [0, 1, 2]


@pytest.mark.parametrize(
    "gone",
    [
        {"mlp_0__d_mi": [0], "classifier__d_c": [0]},
        {"embedding__d_e": [0], "attention_0__d_ao": [0]},
    ],
    ids=["written for nobody", "read from nobody"],
)
def test_what_order_takes_along_changes_no_output(gone: dict) -> None:
    """Against a model in which the lost indices are silent but everything else is there."""
    model = uniform().double().eval()
    table, tensors = model.axis_table(), named_tensors(model)
    decision = decide(model, **gone)
    assert decision is not None
    tokens = torch.tensor([[0, 3, 1, 4]])
    with torch.no_grad():
        for name, indices in gone.items():
            name = name.replace("__", ".")
            axis = table[name if name.startswith(("embed", "class")) else f"operators.{name}"]
            for slot in (*axis.side_a, *axis.riders):
                if slot.tensor.endswith((".gain", ".weight", ".table", ".scale", ".out")):
                    tensors[slot.tensor].select(slot.dim, indices[0]).zero_()
        before = model(tokens)
        cut_(model, table, decision.keeps, decision.removed)
        assert torch.allclose(model(tokens), before, rtol=1e-12, atol=0)


def test_one_operator_takes_the_next_and_both_their_sites() -> None:
    """Attention gone: site 2 loses its writer, so the MLP its input; site 0 loses its reader."""
    decision = decide(relay(), attention_0__d_v="all")
    assert decision is not None
    assert set(decision.removed) == {"operators.attention_0", "operators.mlp_0"}
    assert kept(decision, "D") == [1]
    assert kept(decision, "embedding.d_e") == [1]
    assert kept(decision, "classifier.d_c") == [0]


def test_the_chain_runs_upstream_too() -> None:
    """The MLP gone: site 2 loses its reader, so attention its output, so site 0 its reader."""
    decision = decide(relay(), mlp_0__d_f="all")
    assert decision is not None
    assert set(decision.removed) == {"operators.attention_0", "operators.mlp_0"}
    assert kept(decision, "D") == [1]


@pytest.mark.parametrize(
    "gone",
    [
        {"embedding__d_e": "all"},
        {"classifier__d_c": "all"},
        {"D": "all"},
        # The classifier's only site loses both its writers.
        {"embedding__d_e": [1], "mlp_0__d_mo": "all"},
    ],
    ids=["embedding", "classifier", "stream", "by a chain"],
)
def test_a_required_operator_forbids_the_whole_decision(gone: dict) -> None:
    assert decide(relay(), **gone) is None


def test_the_cascade_leaves_its_arguments_alone() -> None:
    model = relay()
    table, tensors = model.axis_table(), named_tensors(model)
    keeps = {name: torch.ones(n, dtype=torch.bool) for name, n in table.widths(tensors).items()}
    keeps["operators.attention_0.d_v"].zero_()
    before = {name: keep.clone() for name, keep in keeps.items()}
    cascade(table, tensors, keeps)
    assert all(torch.equal(keep, before[name]) for name, keep in keeps.items())
