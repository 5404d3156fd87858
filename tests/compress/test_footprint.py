"""Bytes per parameter that training with compression holds, and needs at an event that cuts.

Beside activations. Counted by the profiler, from the first tensor of the model on.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from gaugelasso.axes import named_tensors
from gaugelasso.compress import element_map
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.models import Transformer, TransformerSpec
from tests.contract.models import PRETRAINED

SPEC = TransformerSpec.uniform(
    width=128, layers=2, heads=4, kv_heads=2, d_k=32, d_v=32, d_f=384, length=8, inputs=1024,
    outputs=1024, eps=1e-5,
)  # fmt: skip


def measured(tied: bool) -> tuple[int, float, float]:
    """Parameters, bytes of each that are held after a step, and at the peak of the event."""
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profiler:
        model = Transformer(replace(SPEC, **PRETRAINED, tied_head=tied))
        size = sum(parameter.numel() for parameter in model.parameters())
        compressor = Compressor(model, 100.0, CompressorOptions(lr=1e-3, interval=100))
        tokens = torch.arange(8)[None]
        compressor.step(lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
        with torch.no_grad():
            named_tensors(model)["operators.mlp_0.up"][:, :5] = 0
        with record_function("event"):
            event = compressor.event_()
    assert event.dropped["operators.mlp_0.d_f"] == 5
    assert not event.undone
    assert event.loss_after is not None  # probed, so that everything can be undone
    now, held, peak = 0, 0, 0
    rows = profiler.profiler.kineto_results.events()
    (start, end) = next(
        (row.start_ns(), row.start_ns() + row.duration_ns())
        for row in rows
        if row.name() == "event"
    )
    for at, change in sorted((r.start_ns(), r.nbytes()) for r in rows if r.name() == "[memory]"):
        now += change
        held = now if at < start else held
        peak = max(peak, now) if start <= at <= end else peak
    return size, held / size, peak / size


# A large model's bounds, and those of one whose elements have numbers.
@pytest.mark.parametrize(("most_stored", "held", "peak"), [(0, 15, 32), (2**26, 30, 52)])
def test_bytes_per_parameter(
    most_stored: int, held: float, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(element_map, "MOST_STORED", most_stored)
    sizes = []
    for tied in (False, True):
        size, *found = measured(tied)
        assert 12 < found[0] < held
        assert found[0] < found[1] < peak
        sizes.append(size)
    # A table of its own, with its gradient and its state, is what a tied head saves.
    assert sizes[0] - sizes[1] == SPEC.inputs * len(SPEC.sites)
