"""Mistakes of a training loop or of a model's declaration: each is an error that names it."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gaugelasso import (
    Axis,
    AxisTable,
    Compressible,
    Compressor,
    CompressorOptions,
    Cost,
    Slot,
    TransformerSpec,
)
from gaugelasso.axes import AxisError
from gaugelasso.errors import UserError
from gaugelasso.models import SpecError

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Net(Compressible):
    """A bilinear network with one hidden axis."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.up = nn.Parameter(torch.randn(8, 6, generator=generator))
        self.down = nn.Parameter(torch.randn(6, 3, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up @ self.down

    def axis_table(self) -> AxisTable:
        return AxisTable(
            axes=(Axis("hidden", "hidden", (Slot("up", 1),), (Slot("down"),), owner="net"),),
            fixed=(Slot("up", 0), Slot("down", 1)),
            matrices={"up": 1, "down": 1},
            costs=(Cost("matmul", 11, ("hidden",)),),
            required=frozenset({"net"}),
        )

    def structure(self) -> dict:
        return {"hidden": self.up.shape[1]}


def start(**options: Any) -> Compressor:
    return Compressor(Net(), 0.1, CompressorOptions(**options))


def backward(compressor: Compressor) -> Tensor:
    loss = compressor.model(X).square().mean()
    loss.backward()
    return loss


def step(compressor: Compressor) -> None:
    compressor.step(backward(compressor))


# --- what a compressor is created with ---------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "right"),
    [
        ("optimizer", "adamw", "muon, adam"),
        ("solver", "magic", "conservative, sign_step, fixed"),
        ("penalty", "l1", "symmetric, one_sided, product_norm"),
        ("calibration", "none", "efficiency, geometry"),
        ("accounting", "flops", "fma, paper"),
        ("lr", -1e-3, "above 0"),
        ("lr", math.nan, "above 0"),
        ("lr", "fast", "a finite number"),
        ("rho", math.nan, "0 or more"),
        ("interval", 2.5, "whole number"),
    ],
)
def test_an_unknown_option_is_named_with_what_is_right(option: str, value: Any, right: str) -> None:
    with pytest.raises(UserError, match=rf"compress\.{option} = .*{right}"):
        CompressorOptions(**{option: value})


@pytest.mark.parametrize("name", ["loss_target", "fma_target"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_target_is_finite(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{name} = .*must be a finite number"):
        Compressor(Net(), **{"loss_target": 0.1, name: value})


def test_a_work_target_is_not_negative() -> None:
    with pytest.raises(UserError, match=r"fma_target = -5\.0: must be .* of 0 or more"):
        Compressor(Net(), 0.1, fma_target=-5.0)


@pytest.mark.parametrize("value", ["0.1", torch.tensor(0.1)], ids=["str", "tensor"])
def test_a_target_is_a_number(value: Any) -> None:
    with pytest.raises(TypeError, match=r"loss_target = .*must be a number, not"):
        Compressor(Net(), value)


def test_a_compressor_needs_something_to_end_at() -> None:
    with pytest.raises(UserError, match=r"give loss_target=.* with steps=.* fma_target="):
        Compressor(Net())
    with pytest.raises(UserError, match=r"fma_target = 5 without loss_target .* give steps="):
        Compressor(Net(), fma_target=5.0)


def test_a_loss_target_below_zero_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """A log-density may be negative, so it is not an error."""
    compressor = Compressor(Net(), -1.0)
    with caplog.at_level(logging.WARNING):
        step(compressor)
        step(compressor)
    assert [record.getMessage()[:40] for record in caplog.records] == [
        "warning: loss_target = -1 is below zero;"
    ]


def test_options_and_probe_have_the_right_type() -> None:
    with pytest.raises(TypeError, match="must be a CompressorOptions"):
        Compressor(Net(), 0.1, {"lr": 0.1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"probe = 0\.3: must be a function"):
        Compressor(Net(), 0.1, probe=0.3)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match=f"parameters are {dtype}.*torch.float32.*autocast"):
        Compressor(Net().to(dtype), 0.1)


def test_a_tensor_on_both_sides_needs_an_axis_without_gauge() -> None:
    class Both(Net):
        def axis_table(self) -> AxisTable:
            table = super().axis_table()
            axis = replace(table.axes[0], side_b=table.axes[0].side_a)
            return replace(table, axes=(axis,))

    with pytest.raises(AxisError, match=r"is on both sides.* gauge=False"):
        Compressor(Both(), 0.1)


def test_a_rider_of_an_axis_without_gauge_has_no_power() -> None:
    sides = (Slot("a"),), (Slot("b"),)
    with pytest.raises(AxisError, match=r"gauge=False.* 'c': leave out its power"):
        Axis("j", "j", *sides, (Slot("c", power=1),), gauge=False)


def test_a_model_without_parameters_is_refused() -> None:
    class Empty(Net):
        def __init__(self) -> None:
            Compressible.__init__(self)

        def axis_table(self) -> AxisTable:
            return AxisTable(())

    with pytest.raises(UserError, match="Empty has no parameters"):
        Compressor(Empty(), 0.1)


# --- what a model declares ---------------------------------------------------------------


def changed(**change: Any) -> Net:
    model = Net()
    table = model.axis_table()
    model.axis_table = lambda: replace(table, **change)  # type: ignore[method-assign]
    return model


def test_missing_methods_are_named() -> None:
    class Bare(Compressible):
        pass

    with pytest.raises(TypeError, match=r"Bare does not define axis_table\(\) and structure\(\)"):
        Compressor(Bare(), 0.1)


def test_removal_must_be_defined_where_an_operator_may_go() -> None:
    Compressor(Net(), 0.1)
    with pytest.raises(TypeError, match=r"Net does not define remove_operator\(\)"):
        Compressor(changed(required=frozenset()), 0.1)


@pytest.mark.parametrize("costs", [(), (Cost("lookup", 5, ("hidden",)),)], ids=["none", "free"])
def test_a_table_in_which_nothing_has_a_price_is_refused(costs: tuple[Cost, ...]) -> None:
    with pytest.raises(UserError, match="no index has a price under the accounting 'fma'"):
        Compressor(changed(costs=costs), 0.1)


def test_an_unknown_kind_of_cost_is_named() -> None:
    with pytest.raises(AxisError, match="cost kind 'matmull' is unknown; use one of matmul,"):
        Cost("matmull", 1, ("hidden",))  # type: ignore[arg-type]


BARE: dict[str, tuple[str, Callable[[], Any]]] = {
    "side": ("side_a = Slot", lambda: Axis("j", "j", Slot("up"), (Slot("down"),))),  # type: ignore
    "list": ("side_b = .*tuple of Slot", lambda: Axis("j", "j", (Slot("a"),), [Slot("b")])),  # type: ignore
    "name": ("'up', which is not a Slot", lambda: Axis("j", "j", ("up",), (Slot("b"),))),  # type: ignore
    "cost": ("axes = 'hidden' is not a tuple", lambda: Cost("matmul", 1, "hidden")),  # type: ignore
    "costs": ("costs = Cost", lambda: changed(costs=Cost("matmul", 1, ("hidden",))).axis_table()),
    "fixed": ("fixed = Slot", lambda: changed(fixed=Slot("up")).axis_table()),
    "required": ("required = 'net' is a string", lambda: changed(required="net").axis_table()),
}


@pytest.mark.parametrize("part", BARE)
def test_a_single_value_in_place_of_a_tuple_is_named(part: str) -> None:
    message, declare = BARE[part]
    with pytest.raises(AxisError, match=message):
        declare()


@pytest.mark.parametrize(("name", "value"), [("width", -4), ("width", 0), ("d_k", -4)])
def test_a_size_is_reported_as_it_was_given(name: str, value: int) -> None:
    sizes = {"width": 8, "layers": 1, "heads": 2, "d_k": 4, "d_v": 4, "d_f": 8, "length": 4}
    with pytest.raises(SpecError, match=f"^{name} = {value}: must be"):
        TransformerSpec.uniform(**{**sizes, "inputs": 5, "outputs": 5, name: value})


# --- what a loop does ----------------------------------------------------------------------


def test_a_step_needs_a_backward() -> None:
    compressor = start()
    before = compressor.model.up.detach().clone()
    with pytest.raises(UserError, match=r"no parameter has a gradient; call loss\.backward"):
        compressor.step(compressor.model(X).mean())
    loss = backward(compressor)
    compressor.step(loss)
    with pytest.raises(UserError, match=r"no parameter has a gradient.* step once for each"):
        compressor.step(loss)
    assert compressor.steps == 1
    assert not torch.equal(compressor.model.up, before)


def test_a_step_in_eval_mode_is_refused() -> None:
    compressor = start()
    compressor.model.eval()
    loss = backward(compressor)
    with pytest.raises(UserError, match=r"eval mode.*model\.train\(\)"):
        compressor.step(loss)


@pytest.mark.parametrize("loss", [torch.ones(4), torch.ones((), dtype=torch.long)])
def test_the_loss_is_one_number(loss: Tensor) -> None:
    compressor = start()
    backward(compressor)
    with pytest.raises(UserError, match=r"as one number, not a torch\.\w+ tensor of shape"):
        compressor.step(loss)
    with pytest.raises(UserError, match="must return the loss as one number, not a torch"):
        start().step(lambda: torch.ones(4, requires_grad=True))


def test_a_record_is_a_path() -> None:
    with pytest.raises(TypeError, match="record = 3: must be the path of a folder"):
        Compressor(Net(), loss_target=0.5, steps=100, record=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_detached_loss_of_one_element_is_fine(shape: tuple[int, ...]) -> None:
    """Partial losses are summed detached."""
    compressor = start()
    compressor.step(backward(compressor).detach().reshape(shape))
    assert compressor.skipped == 0


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "double": lambda model: model.to(torch.float64),
    "half": lambda model: model.half(),
    "device": lambda model: model.to("meta"),
    "data": lambda model: setattr(model.down, "data", model.down.data.clone()),
    "replaced": lambda model: setattr(model, "down", nn.Parameter(model.down.detach().clone())),
    "another compressor": lambda model: Compressor(model, 0.1),
}


@pytest.mark.parametrize("when", ["before the first step", "between steps"])
@pytest.mark.parametrize("change", CONVERSIONS)
def test_parameters_that_left_the_storage_are_named(change: str, when: str) -> None:
    compressor = start(interval=4)
    if when == "between steps":
        step(compressor)
    model = compressor.model
    CONVERSIONS[change](model)
    # A single parameter is found within an interval, a conversion of them all at once.
    steps = 4 if change in ("data", "replaced") and when == "between steps" else 1

    def loop() -> None:
        for _ in range(steps):
            weights = dict(model.named_parameters()).values()
            torch.stack([weight.float().square().sum() for weight in weights]).sum().backward()
            compressor.step(torch.ones(()))

    with pytest.raises(UserError, match=r"'(up|down)' was converted, moved or replaced"):
        loop()


def test_another_optimizer_on_the_same_weights_is_found() -> None:
    compressor = start()
    optimizer = torch.optim.SGD(compressor.model.parameters(), 1e-3)

    def loop(steps: int) -> None:
        for _ in range(steps):
            loss = backward(compressor)
            optimizer.step()
            compressor.step(loss)

    with pytest.raises(UserError, match=r"something else changed the weights.*own optimizer"):
        loop(10)
    assert 2 <= compressor.steps <= 4


def test_weights_may_be_written_in_between() -> None:
    compressor = start(interval=2, solver="fixed", rho=1e-3)
    saved = {name: value.clone() for name, value in compressor.model.state_dict().items()}
    for number in range(12):
        step(compressor)
        if number % 3 == 0:
            compressor.model.load_state_dict(saved)
        if number % 3 == 1:
            compressor.event_()


@pytest.mark.parametrize("lr", [-1e-3, math.nan, math.inf])
def test_a_learning_rate_is_finite_and_not_negative(lr: float) -> None:
    with pytest.raises(UserError, match=r"lr = .*must be a finite number of 0 or more"):
        start().set_lr_(lr)


def test_a_pressure_is_not_negative() -> None:
    with pytest.raises(UserError, match=r"pressure = -0\.5: must be"):
        start().set_pressure_(-0.5)


def test_the_checks_read_nothing_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    compressor = start()
    loss = backward(compressor)

    def read(*_: Any) -> Any:
        raise AssertionError("a value was read")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu"):
        monkeypatch.setattr(Tensor, name, read)
    compressor._checks.before_step(loss, thorough=True)
    compressor._checks.after_step()
