"""Every dim of every tensor is owned or declared fixed, and a wrong table says so."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gaugelasso.axes import Axis, AxisError, AxisTable, Cost, Norm, Slot, named_tensors
from tests.contract.models import CASES, ROWS, TRANSFORMERS, Case, is_linked, make

QUERY, KEY = "operators.attention_0.query", "operators.attention_0.key"
GAIN, SITES = "operators.attention_0.read.gain", "operators.attention_0.read.sites"
UP, OUT, FREQUENCIES = "operators.mlp_0.up", "classifier.out", "operators.attention_0.frequencies"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_table_covers_the_model(case: Case) -> None:
    model = make(case)
    model.axis_table().check(named_tensors(model))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_dim_left_out_is_noticed(case: Case) -> None:
    model = make(case)
    table, tensors = model.axis_table(), named_tensors(model)
    for slot in table.fixed:
        without = replace(table, fixed=tuple(s for s in table.fixed if s != slot))
        with pytest.raises(AxisError, match=slot.tensor):
            without.check(tensors)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.dropped and is_linked(case)], ids=str
)
def test_dropped_cases_are_uneven(case: Case) -> None:
    model = make(case)
    table, tensors = model.axis_table(), named_tensors(model)
    widths = table.widths(tensors)
    (stream,) = (axis for axis in table.axes if axis.linked())
    homes = {table.home(slot) for slot in stream.linked()}
    assert len({widths[home] for home in homes}) > 1
    assert min(widths[home] for home in homes) < widths[stream.name]


def change_axis(which: str, /, **changes: object) -> Callable[[AxisTable], AxisTable]:
    def corrupt(table: AxisTable) -> AxisTable:
        axes = tuple(replace(a, **changes) if a.name == which else a for a in table.axes)
        assert axes != table.axes
        return replace(table, axes=axes)

    return corrupt


def add_slot(name: str, part: str, slot: Slot) -> Callable[[AxisTable], AxisTable]:
    return lambda table: change_axis(name, **{part: (*getattr(table[name], part), slot)})(table)


def add_fixed(*slots: Slot) -> Callable[[AxisTable], AxisTable]:
    return lambda table: replace(table, fixed=(*table.fixed, *slots))


def fix_link(table: AxisTable) -> AxisTable:
    """The reader's width shrinks, but the map of its positions does not."""
    name = "operators.attention_0.d_ai"
    riders = tuple(slot for slot in table[name].riders if slot.tensor != SITES)
    return add_fixed(Slot(SITES))(change_axis(name, riders=riders)(table))


WRONG_TABLES = {
    "rider forgotten": (change_axis("operators.attention_0.d_k", riders=()), FREQUENCIES),
    "claimed twice": (add_fixed(Slot(UP, 0)), UP),
    "claimed by two axes": (add_slot("operators.mlp_0.d_mo", "riders", Slot(KEY, 3)), KEY),
    "unknown tensor": (add_slot("operators.mlp_0.d_f", "riders", Slot("ghost", 0)), "ghost"),
    "unknown link": (add_slot("D", "riders", Slot(GAIN, 0, link="ghost")), "ghost"),
    "unknown fixed tensor": (add_fixed(Slot("ghost", 0)), "ghost"),
    "no such dim": (add_slot("operators.mlp_0.d_f", "riders", Slot(UP, 2)), UP),
    "wrong width": (add_slot("D", "riders", Slot(OUT, 1)), OUT),
    "three penalties": (add_slot("D", "side_a", Slot(QUERY, 0, link=SITES)), QUERY),
    "link on a fixed dim": (add_slot("D", "side_b", Slot(OUT, 1, link=SITES)), OUT),
    "empty side": (change_axis("operators.mlp_0.d_f", side_b=()), "operators.mlp_0.d_f"),
    "nothing carries the width": (
        lambda table: replace(
            table, axes=(*table.axes, Axis("d_x", "d_x", *[(Slot(GAIN, link=SITES),)] * 2))
        ),
        "d_x",
    ),
    "one name, two axes": (change_axis("operators.mlp_0.d_mo", name="D"), "D"),
    "cost of no axis": (
        lambda table: replace(table, costs=(*table.costs, Cost("matmul", 1, ("d_x",)))),
        "d_x",
    ),
    "unknown matrix": (lambda table: replace(table, matrices={"ghost": 1}), "ghost"),
    "matrix without columns": (
        lambda table: replace(table, matrices={**table.matrices, UP: 2}),
        UP,
    ),
    "unknown norm": (lambda table: replace(table, norms=(Norm(GAIN, "ghost", GAIN),)), "ghost"),
    "unknown owner required": (
        lambda table: replace(table, required=frozenset({"ghost"})),
        "ghost",
    ),
    "buffer penalised": (
        change_axis(
            "operators.attention_0.d_k", side_a=(Slot(FREQUENCIES),), riders=(Slot(QUERY, 3),)
        ),
        FREQUENCIES,
    ),
    "link does not shrink": (fix_link, SITES),
}


@pytest.mark.parametrize("wrong", WRONG_TABLES)
def test_wrong_table_names_the_culprit(wrong: str) -> None:
    corrupt, culprit = WRONG_TABLES[wrong]
    model = make(Case(ROWS[0], dropped=False, seed=0))
    with pytest.raises(AxisError, match=culprit):
        corrupt(model.axis_table()).check(named_tensors(model))


def narrower(tensor: Tensor) -> Tensor:
    return tensor[..., :-1]


WRONG_TENSORS = {
    "width disagrees": (KEY, narrower),
    "link points outside": (SITES, lambda sites: sites + 1),
    "link points below": (SITES, lambda sites: sites - 1),
    "link names an index twice": (SITES, torch.zeros_like),
    "link too short": (SITES, narrower),
    "one dim more": (UP, lambda up: up.unsqueeze(-1)),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_wrong_tensor_is_named(wrong: str) -> None:
    name, corrupt = WRONG_TENSORS[wrong]
    model = make(Case(ROWS[0], dropped=False, seed=0))
    tensors = named_tensors(model)
    with pytest.raises(AxisError, match=name):
        model.axis_table().check({**tensors, name: corrupt(tensors[name])})


def test_rider_link_is_checked_as_well() -> None:
    """A rider that follows the balance through a map of another length would break it."""
    model = make(Case(ROWS[0], dropped=True, seed=0))
    table, tensors = model.axis_table(), named_tensors(model)
    sites = "embedding.write.sites"
    other = next(
        slot
        for slot in table["D"].riders
        if slot.link is not None and len(tensors[slot.link]) != len(tensors[sites])
    )
    riders = tuple(replace(s, link=sites) if s == other else s for s in table["D"].riders)
    with pytest.raises(AxisError, match=other.tensor):
        change_axis("D", riders=riders)(table).check(tensors)


def test_axes_say_how_they_may_grow() -> None:
    """The paper's tab:regrowth_class, as the built-in transformer declares it."""
    for case in TRANSFORMERS:
        model = make(case)
        for axis in model.axis_table().axes:
            plain_keys = axis.kind == "d_k" and not model.initial_spec.qk_norm
            rope = plain_keys and model.get_submodule(str(axis.owner)).rope
            linear = axis.kind == "d_v" or (plain_keys and not rope)
            expected = "linear" if linear else "rotation" if rope else "permutation"
            assert axis.growth == expected, axis.name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"growth": "rope"}, "growth = 'rope' is unknown; use one of linear, rotation"),
        ({"growth": "linear", "riders": (Slot("bias"),)}, "'bias' has a link or is a rider"),
        ({"growth": "linear", "gauge": False}, "it has gauge=False"),
        (
            {"growth": "permutation", "gauge": False, "side_b": (Slot("up"),)},
            "'up' is on both sides",
        ),
    ],
)
def test_a_growth_that_the_axis_cannot_have_is_refused(wrong: dict, message: str) -> None:
    given = {"side_a": (Slot("up"),), "side_b": (Slot("down"),)} | wrong
    with pytest.raises(AxisError, match=re.escape(message)):
        Axis("hidden", "hidden", **given)
