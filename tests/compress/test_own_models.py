"""Models that are not transformers: biases, riders with a power, and nothing removable left."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso import Axis, AxisTable, Compressible, Compressor, CompressorOptions, Cost, Slot
from gaugelasso.compress.drop import next_to_go
from gaugelasso.compress.penalty import ranked
from tests.examples import example


def perceptron(*shape: int) -> Any:
    """The perceptron of the example; its bias is a rider."""
    return example("your_model").Perceptron(*shape)


def residual(*shape: int) -> Any:
    """The residual network of the example; its biases are on side A."""
    return example("residual_relu").ResidualReLU(*shape)


def train(
    model: Compressible, seed: int, steps: int, target: float, **options: Any
) -> tuple[Compressor, float]:
    """Fit a random perceptron of four units on fresh batches; fails at the first non-finite value.

    Returns the compressor and the mean loss of the last steps.
    """
    generator = torch.Generator().manual_seed(seed)
    teacher = perceptron(8, 4, 3).requires_grad_(False)
    for parameter in teacher.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    settings = CompressorOptions(**{"lr": 3e-3, "interval": 25, **options})
    compressor = Compressor(model, target, settings)
    losses = []
    for step in range(steps):
        x = torch.randn(256, 8, generator=generator)
        loss = F.mse_loss(model(x), teacher(x))
        loss.backward()
        compressor.step(loss)
        losses.append(loss.item())
        finite = compressor.resume_state.finite()
        assert finite, f"a value is not finite after step {step + 1}"
    assert compressor.skipped == 0
    return compressor, sum(losses[-50:]) / 50


def seeded(seed: int, kind: str) -> Compressible:
    torch.manual_seed(seed)
    return perceptron(8, 64, 3) if kind == "perceptron" else residual(8, 8, 32, 3, 2)


# --- long runs stay finite -------------------------------------------------------------


def test_the_state_of_a_drifting_unit_stays_finite() -> None:
    """The gauge of one unit drifts the same way in every interval, so c < 1 at every event."""
    compressor, loss = train(seeded(1, "perceptron"), 1, 900, 0.5)
    assert compressor.optimizer.second.max() < 1e15
    assert loss < 0.6


def test_a_large_bias_does_not_grow_at_every_balance() -> None:
    """By its weights alone a unit that became a constant looks small, and its bias is enlarged."""
    compressor, loss = train(seeded(21, "perceptron"), 21, 500, 0.5)
    assert compressor.model.bias.abs().max() < 5
    assert loss < 0.6


# --- nothing removable left ------------------------------------------------------------


class Unowned(Compressible):
    """A perceptron whose hidden axis has no owner: it may shrink to width 0 and stays."""

    def __init__(self, hidden: int, silences: bool = True):
        super().__init__()
        self.silences = silences
        self.up = nn.Parameter(torch.randn(8, hidden) * 0.1)
        self.gain = nn.Parameter(torch.ones(hidden))
        self.down = nn.Parameter(torch.randn(hidden, 3) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.up * self.gain) @ self.down

    def axis_table(self) -> AxisTable:
        return AxisTable(
            axes=(
                Axis(
                    name="hidden",
                    kind="hidden",
                    side_a=(Slot("up", 1), Slot("gain")),
                    side_b=(Slot("down"),),
                    silences=self.silences,
                ),
            ),
            fixed=(Slot("up", 0), Slot("down", 1)),
            matrices={"up": 1, "down": 1},
            costs=(Cost("matmul", 11, ("hidden",)),),
        )

    def structure(self) -> dict:
        return {"hidden": self.up.shape[1]}


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
@pytest.mark.parametrize("options", [{}, {"solver": "fixed", "rho": 1.0}], ids=["target", "fixed"])
def test_training_goes_on_when_every_operator_is_gone(
    options: dict[str, Any], optimizer: str
) -> None:
    torch.manual_seed(0)
    model = residual(8, 8, 6, 3, 2)
    options = {"lr": 0.03, "interval": 5, "multiple": 2, "optimizer": optimizer, **options}
    compressor, _ = train(model, 0, 150 if optimizer == "adam" else 80, 1e6, **options)
    assert compressor.widths == {}
    assert compressor.structure["hidden"] == {}
    assert compressor.fma == 8 * (8 + 3)
    events, weight = len(compressor.history), compressor.model.leave.detach().clone()
    compressor.event_()
    train_on(compressor, 10)
    assert len(compressor.history) == events + (3 if options.get("solver") else 1)
    assert not torch.equal(compressor.model.leave, weight)
    assert (compressor.utility(), compressor.prices) == ({}, {})


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
@pytest.mark.parametrize("options", [{}, {"solver": "fixed", "rho": 1.0}], ids=["target", "fixed"])
def test_training_goes_on_when_every_axis_is_empty(options: dict[str, Any], optimizer: str) -> None:
    torch.manual_seed(0)
    options = {"lr": 0.03, "interval": 5, "optimizer": optimizer, **options}
    compressor, _ = train(Unowned(6), 0, 130 if optimizer == "adam" else 80, 1e6, **options)
    assert compressor.widths == {"hidden": 0}
    assert compressor.fma == 0
    compressor.event_()
    train_on(compressor, 10)
    assert compressor.utility()["hidden"].shape == (0,)
    assert ranked(compressor.utility(), compressor.prices) == []
    compressor.fma_target = 5.0
    assert compressor.work_target_met


def test_an_empty_axis_that_does_not_silence_its_owner_has_no_strongest_index() -> None:
    compressor = Compressor(Unowned(0, silences=False), 1e6, CompressorOptions(interval=1))
    train_on(compressor, 3)
    compressor.event_()
    assert next_to_go(compressor.state.table, compressor.utility(), compressor.prices) == []


def test_a_table_without_axes_is_plain_training() -> None:
    torch.manual_seed(0)
    compressor, _ = train(residual(8, 8, 6, 3, 0), 0, 60, 1e6)
    assert compressor.history == []
    assert compressor.fma == compressor.fma_initial > 0
    assert compressor.event_().dropped == {}


def train_on(compressor: Compressor, steps: int) -> None:
    for _ in range(steps):
        loss = compressor.model(torch.ones(4, 8)).square().mean()
        loss.backward()
        compressor.step(loss)
