"""Bytes per parameter that training with compression holds, and needs at an event that cuts.

Beside activations. Counted by the profiler, from the first tensor of the model on.
"""

from collections.abc import Callable
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

Hold = Callable[[Compressor], None]
# What is measured, by the names of profiled ranges.
NAMES = ("held", "event", "undone")
SPEC = TransformerSpec.uniform(
    width=128, layers=2, heads=4, kv_heads=2, d_k=32, d_v=32, d_f=384, length=8, inputs=1024,
    outputs=1024, eps=1e-5,
)  # fmt: skip


def footprint(spec: TransformerSpec, options: CompressorOptions, hold_: Hold) -> dict[str, float]:
    """Bytes of each parameter that are held after a step, and at the peaks of what `hold_` does.

    `hold_` receives the compressor, and names its parts by `record_function`.
    """
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profiler:
        model = Transformer(spec)
        size = sum(parameter.numel() for parameter in model.parameters())
        compressor = Compressor(model, 100.0, options)
        tokens = torch.arange(8)[None]
        compressor.step(lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
        with record_function("held"):
            torch.empty(1)
        hold_(compressor)
    rows = profiler.profiler.kineto_results.events()
    now, changes = 0, []
    for at, change in sorted((r.start_ns(), r.nbytes()) for r in rows if r.name() == "[memory]"):
        now += change
        changes.append((at, now / size))
    found = {}
    for row in rows:
        if row.name() in NAMES:
            start, end = row.start_ns(), row.start_ns() + row.duration_ns()
            found[row.name()] = max(there for at, there in changes if start <= at <= end)
    return found


def cut_filters(compressor: Compressor) -> None:
    with torch.no_grad():
        named_tensors(compressor.model)["operators.mlp_0.up"][:, :5] = 0
    with record_function("event"):
        event = compressor.event_()
    assert event.dropped["operators.mlp_0.d_f"] == 5
    assert not event.undone
    assert event.loss_after is not None  # probed, so that everything can be undone


def cut_by_harm(compressor: Compressor) -> None:
    for name, allowance in (("event", 1.0), ("undone", -1.0)):
        compressor.set_loss_target_(100.0, allowance)
        with record_function(name):
            event = compressor.event_()
        assert bool(event.dropped) == (name == "event")
        assert bool(event.undone) == (name == "undone")


# A large model's bounds, and those of one whose elements have numbers, as on a GPU.
@pytest.mark.parametrize(("most_stored", "held", "peak"), [(0, 15, 31), (2**26, 30, 50)])
def test_bytes_per_parameter(
    most_stored: int, held: float, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(element_map, "MOST_STORED", most_stored)
    monkeypatch.setattr(element_map, "MOST_STORED_ON_CPU", most_stored)
    options = CompressorOptions(lr=1e-3, interval=100)
    for tied in (False, True):
        spec = replace(SPEC, **PRETRAINED, tied_head=tied)
        found = footprint(spec, options, cut_filters)
        assert 12 < found["held"] < held
        assert found["held"] < found["event"] < peak


def test_models_of_more_than_half_a_million_parameters_store_no_numbers_on_a_cpu() -> None:
    """So that they hold as little as large ones do."""
    spec = replace(SPEC, **PRETRAINED)
    assert sum(each.numel() for each in Transformer(spec).parameters()) > 2**19
    found = footprint(spec, CompressorOptions(lr=1e-3, interval=100), cut_filters)
    assert found["held"] < 20
    assert found["event"] < 32


def test_bytes_per_parameter_where_channels_go_by_their_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where cuts are undone, each of which replaces all weights."""
    monkeypatch.setattr(element_map, "MOST_STORED", 0)
    spec = replace(SPEC, **PRETRAINED, tied_head=True)
    options = CompressorOptions(lr=1e-3, interval=100, removal="harm")
    found = footprint(spec, options, cut_by_harm)
    assert 12 < found["held"] < 15
    assert max(found["event"], found["undone"]) < 24


def test_a_tied_head_saves_its_table() -> None:
    sizes = [
        sum(each.numel() for each in Transformer(replace(SPEC, tied_head=tied)).parameters())
        for tied in (False, True)
    ]
    assert sizes[0] - sizes[1] == SPEC.inputs * len(SPEC.sites)
