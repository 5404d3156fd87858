"""Groups: every element is where its axes say, and waves keep the order that matters."""

import pytest
import torch

from gaugelasso.axes import named_tensors, width
from gaugelasso.compress import reference
from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.groups import Groups, waves
from tests.contract.models import WHOLE, Case, make
from tests.toys import chain, gaussian, pairs


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_sums_and_counts_are_those_of_the_slots(case: Case) -> None:
    model = make(case)
    table = model.axis_table()
    store = FlatStore(model, table)
    tensors = named_tensors(model)
    groups = Groups(table, tensors, store)
    flat = gaussian(len(store), seed=case.seed)
    values, sums = store.views(flat), groups.sums(flat)
    for axis in table.axes:
        size = width(axis, tensors)
        for side, slots in axis.sides():
            mine = groups.ranges[axis.name].side(side)
            by_hand = [reference.collect(values[s.tensor], s, tensors, size) for s in slots]
            assert torch.allclose(sums[mine], torch.stack(by_hand).sum(0))
            counts = reference.side_counts(axis, slots, tensors)
            assert groups.counts[mine].tolist() == counts.tolist()
        a, b = (groups.ranges[axis.name].side(side) for side in ("a", "b"))
        assert torch.equal(groups.partner[a], torch.arange(b.start, b.stop))
        assert torch.equal(groups.partner[b], torch.arange(a.start, a.stop))
    for number, wave in enumerate(groups.waves):
        assert torch.equal(groups.sums(flat, number), sums[wave])
    assert groups.waves[-1].stop == groups.none == len(sums) - 1


def test_axes_that_share_no_tensor_are_one_wave() -> None:
    assert [
        [axis.name for axis in wave] for wave in waves(pairs((2, 1, 1), (3, 1, 1)).declared)
    ] == [["axis0", "axis1"]]
    assert [[axis.name for axis in wave] for wave in waves(chain(1, 2, 3, 4).declared)] == [
        ["j"],
        ["k"],
    ]


def test_the_number_of_waves_does_not_grow_with_depth() -> None:
    table = make(WHOLE[0]).axis_table()
    kinds = [{axis.kind for axis in wave} for wave in waves(table)]
    assert kinds == [{"d_e", "d_ai", "d_mi", "d_c"}, {"d_k", "d_v", "d_f"}, {"d_ao", "d_mo"}, {"D"}]
