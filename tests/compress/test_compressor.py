"""The compressor: its public face, its options, and what it refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gaugelasso.axes import AxisTable
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from tests.compress.small_compressor import SPEC, start


def test_the_public_face_fits_on_a_screen() -> None:
    """What only a trainer or a checkpoint needs is on the parts, not here."""
    step = {"step", "finish_step_", "set_lr_", "set_loss_target_", "set_pressure_"}
    run = {"finish", "done"}
    event = {"event_", "on_drop"}
    progress = {"fma", "work_target_met", "parameters", "widths", "structure", "prices", "utility"}
    scalars = {"rho", "skipped", "failing"}
    state = {"state_tensors", "load_state_tensors_", "optimizer"}
    public = {name for name in vars(Compressor) if not name.startswith("_")}
    assert public == step | run | event | progress | scalars | state


def test_what_cannot_be_compressed_is_told_so() -> None:
    with pytest.raises(TypeError, match="Linear does not say what can be cut out of it"):
        Compressor(torch.nn.Linear(3, 3), 0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="step wants the loss that backward was called on"):
        start().step(0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0),
        ("trust", -1.0),
        ("beta", 1.0),
        ("norm_rate", -0.1),
        ("interval", 0),
        ("multiple", 0),
        ("accounting", "joules"),
        ("sinkhorn_sweeps", -1),
    ],
)
def test_a_senseless_option_is_named(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name):
        CompressorOptions(**{name: value})


def test_a_frozen_parameter_is_refused() -> None:
    model = Transformer(SPEC)
    model.classifier.out.requires_grad_(False)
    with pytest.raises(UserError, match=r"'classifier\.out' is frozen"):
        Compressor(model, 1.0)


@pytest.mark.parametrize("change", [torch.bfloat16, "meta"], ids=["dtype", "device"])
def test_parameters_of_two_dtypes_or_devices_are_refused(change: Any) -> None:
    model = Transformer(SPEC)
    model.classifier.out = torch.nn.Parameter(model.classifier.out.detach().to(change))
    before = {name: parameter.dtype for name, parameter in model.named_parameters()}
    with pytest.raises(UserError, match=r"'classifier\.out' is torch\.\w+ on \w+; all") as caught:
        Compressor(model, 1.0)
    assert "'embedding.table' is torch.float32 on cpu" in str(caught.value)
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == before


def test_a_table_without_costs_is_refused() -> None:
    class Free(Transformer):
        def axis_table(self) -> AxisTable:
            return replace(super().axis_table(), costs=())

    with pytest.raises(UserError, match="no index has a price under the accounting 'fma'"):
        Compressor(Free(SPEC), 1.0)
