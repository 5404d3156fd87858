"""Sums of rows and columns in three launches, against the plain ones."""

from typing import Any

import pytest
import torch

from gaugelasso import kernels
from gaugelasso.axes import named_tensors
from gaugelasso.compress import element_map, groups
from gaugelasso.compress.flat import FlatStore
from gaugelasso.models import Transformer, TransformerSpec
from tests.kernels import CUDA, DEVICE

pytest.importorskip("triton")

from gaugelasso.kernels import dispatch
from gaugelasso.kernels.gpu import row_sums

SPEC = TransformerSpec.uniform(
    inputs=11, outputs=7, length=6, width=12, layers=2, heads=2, d_k=4, d_v=3, d_f=10, rope=True
)
SHAPES = [
    ((7,), 0),
    ((9, 5), 0),
    ((9, 5), 1),
    ((1, 70), 1),
    ((70, 1), 0),
    ((600, 70), 1),  # more rows than a chunk has, more columns than a block
    ((3, 11, 6), 1),
    ((3, 11, 6), 2),
    ((2, 5000), 0),
    ((0, 4), 1),
    ((0, 4), 0),
]


@pytest.mark.parametrize("kind", ["plain", "squared", "product"])
def test_sums_of_every_shape(kind: str) -> None:
    slots, expected, start = [], [], 3
    sizes = [torch.Size(shape).numel() for shape, _ in SHAPES]
    generator = torch.Generator().manual_seed(0)
    values, others = torch.randn(2, start + sum(sizes) + 2, generator=generator).to(DEVICE)
    factors = {"plain": None, "squared": values, "product": others}[kind]
    terms = values if factors is None else values * factors
    for (shape, dim), size in zip(SHAPES, sizes, strict=True):
        slots.append((start, shape, dim))
        part = terms[start : start + size].view(shape).movedim(dim, 0)
        part = part[..., None].flatten(1) if part.numel() else part.new_zeros(shape[dim], 1)
        expected.append(part.sum(1))
        start += size
    found = row_sums.RowSums(slots, values.device)(values, factors)
    assert torch.allclose(found, torch.cat(expected), rtol=1e-5, atol=1e-4)
    assert torch.equal(found, row_sums.RowSums(slots, values.device)(values, factors))


def test_groups_of_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and sums of groups are those of the plain form, and those of stored elements."""
    model = Transformer(SPEC).to(DEVICE)
    store = FlatStore(model, model.axis_table())
    tensors = named_tensors(model)
    stored = groups.Groups(model.axis_table(), tensors, store)
    monkeypatch.setattr(element_map, "MOST_STORED", 0)
    large = groups.Groups(model.axis_table(), tensors, store)
    if not CUDA:
        monkeypatch.setattr(groups, "fused_flat", lambda _: not dispatch._plain)
    generator = torch.Generator().manual_seed(1)
    values, others = torch.randn(2, len(store), generator=generator).to(DEVICE)
    kinds: list[dict[str, Any]] = [{}, {"squared": True}, {"factors": others}]
    for kind in kinds:
        with kernels.reference_kernels():
            plain, known = (each.sums(values, **kind) for each in (large, stored))
        fused = large.sums(values, **kind)
        assert torch.allclose(fused, plain, rtol=1e-5, atol=1e-4)
        assert torch.allclose(fused, known, rtol=1e-5, atol=1e-4)
