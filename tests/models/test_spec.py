"""A structure with its widths rounded up: each is the next multiple, and the model runs."""

import pytest
import torch

from gaugelasso.axes import named_tensors
from gaugelasso.compress.drop import grains
from gaugelasso.models import Transformer, round_up
from tests.contract.models import TRANSFORMERS, Case, make, output


@pytest.mark.parametrize("case", TRANSFORMERS, ids=str)
@pytest.mark.parametrize("multiple", [1, 3, 4, 8])
def test_every_width_is_the_next_multiple(case: Case, multiple: int) -> None:
    model = make(case)
    spec = model.spec()
    wide = Transformer(round_up(spec, multiple)).double().eval()
    table, tensors = wide.axis_table(), named_tensors(wide)
    table.check(tensors)
    before = model.axis_table().widths(named_tensors(model))
    after = table.widths(tensors)
    # The stream is rounded too, although compression gives it any width.
    grain = grains(table, multiple) | {"D": multiple}
    assert after == {name: -(-n // grain[name]) * grain[name] for name, n in before.items()}
    assert output(wide, case).isfinite().all()


@pytest.mark.parametrize("case", TRANSFORMERS, ids=str)
def test_existing_indices_keep_their_positions(case: Case) -> None:
    spec = make(case).spec()
    wide = round_up(spec, 4)
    assert round_up(spec, 1) == spec
    assert round_up(wide, 4) == wide
    assert wide.sites[: len(spec.sites)] == spec.sites
    assert wide.embed[: len(spec.embed)] == spec.embed
    for new, old in zip(wide.operators, spec.operators, strict=True):
        assert new.reads[: len(old.reads)] == old.reads
        assert new.writes[: len(old.writes)] == old.writes
    tensors = dict(Transformer(wide).named_buffers())
    for name, buffer in Transformer(spec).named_buffers():
        if name.endswith("frequencies"):
            assert torch.equal(tensors[name][: len(buffer)], buffer)
