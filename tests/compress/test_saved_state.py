"""A state kept in memory: put back to the last bit, also from a smaller structure."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.compress.saved_state import SavedState
from gaugelasso.models import Transformer
from tests.compress.small_compressor import FILTERS, SPEC, fade_, task_loss
from tests.compress.test_ungauged import TiedNet
from tests.examples import example


def transformer(**options: Any) -> Compressor:
    chosen = {"lr": 1e-3, "interval": 3, "loss_smoothing": 0.5} | options
    return Compressor(Transformer(SPEC).double(), 1e9, CompressorOptions(**chosen))


def perceptron(**options: Any) -> Compressor:
    torch.manual_seed(0)
    chosen = {"lr": 1e-3, "interval": 3} | options
    return Compressor(example("your_model").Perceptron(8, 12, 3), 1e9, CompressorOptions(**chosen))


def loss_of(model: Any) -> Tensor:
    if hasattr(model, "up"):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
        return (model(x) - 1).square().mean()
    return task_loss(model)


def train(compressor: Compressor, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(compressor.model)
        loss.backward()
        compressor.step(loss)
        losses.append(float(loss.detach()))
    return losses


def everything(compressor: Compressor) -> tuple[str, dict[str, Tensor]]:
    """Structure, and copies of all tensors that the next step depends on."""
    tensors = {**named_tensors(compressor.model), **compressor.state_tensors()}
    tensors |= {f"{i}": v.values for i, v in enumerate(compressor.optimizer.state)}
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return json.dumps(compressor.structure), copies


def assert_same(one: tuple[str, dict[str, Tensor]], other: tuple[str, dict[str, Tensor]]) -> None:
    assert one[0] == other[0]
    assert list(one[1]) == list(other[1])  # flat storage depends on the order
    for name, tensor in one[1].items():
        assert torch.equal(tensor, other[1][name]), name


def save(compressor: Compressor) -> SavedState:
    return SavedState(compressor.state, compressor.resume_state)


def load_(saved: SavedState, compressor: Compressor) -> None:
    saved.load_(compressor.state, compressor.resume_state)


@pytest.mark.parametrize("start", [transformer, perceptron])
@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_a_saved_state_comes_back_after_cuts(start: Any, optimizer: str) -> None:
    """Twice, and training goes on from it as it did, cuts and all."""
    compressor = start(optimizer=optimizer)
    train(compressor, 4)
    saved, before, fma = save(compressor), everything(compressor), compressor.fma
    steps, cut = compressor.steps, {}

    def onwards() -> tuple[list[float], tuple[str, dict[str, Tensor]]]:
        compressor.steps = steps  # events come at the same steps again
        losses = train(compressor, 3)
        axis = FILTERS if FILTERS in compressor.widths else "hidden"
        fade_like(compressor, axis, [1, 3])
        losses += train(compressor, 4)
        cut[axis] = compressor.widths[axis]
        return losses, everything(compressor)

    first = onwards()
    assert first[1][0] != before[0]
    assert compressor.fma < fma == saved.fma
    for _ in range(2):
        load_(saved, compressor)
        assert_same(everything(compressor), before)
        assert compressor.fma == fma
        losses, after = onwards()
        assert losses == first[0]
        assert_same(after, first[1])


@torch.no_grad()
def fade_like(compressor: Compressor, axis: str, indices: list[int]) -> None:
    """As `fade_`, in the precision of the model."""
    if axis == FILTERS:
        fade_(compressor, axis, indices)
        return
    model: Any = compressor.model
    model.up[:, indices] *= 1e-6
    model.down[indices] *= 1e-6
    model.bias[indices] *= 1e-6


def test_an_operator_that_was_removed_comes_back() -> None:
    compressor = transformer()
    train(compressor, 4)
    saved, before = save(compressor), everything(compressor)
    module = dict(compressor.model.named_modules())["operators.mlp_0"]
    fade_(compressor, FILTERS, list(range(5)))
    assert compressor.event_().removed == ("operators.mlp_0",)
    train(compressor, 2)
    load_(saved, compressor)
    assert_same(everything(compressor), before)
    assert dict(compressor.model.named_modules())["operators.mlp_0"] is module
    train(compressor, 2)
    assert FILTERS in compressor.widths


def test_a_pressed_model_comes_back_from_next_to_nothing() -> None:
    compressor = perceptron(lr=0.02, trust=3.0, solver="fixed", rho=0.1)
    saved, before = save(compressor), everything(compressor)
    train(compressor, 60)
    assert compressor.widths["hidden"] <= 3
    load_(saved, compressor)
    assert_same(everything(compressor), before)


def test_a_later_state_and_an_earlier_one_stay_apart() -> None:
    """Both belong to one compressor, and are loaded in any order."""
    compressor = transformer()
    train(compressor, 2)
    early, was_early = save(compressor), everything(compressor)
    fade_(compressor, FILTERS, [0])
    compressor.event_()
    train(compressor, 2)
    late, was_late = save(compressor), everything(compressor)
    fade_(compressor, FILTERS, [1])
    fade_(compressor, "D", [2])
    compressor.event_()
    for saved, was in ((early, was_early), (late, was_late), (early, was_early)):
        load_(saved, compressor)
        assert_same(everything(compressor), was)
        train(compressor, 2)
    load_(late, compressor)
    assert_same(everything(compressor), was_late)


def test_the_saved_values_are_copies() -> None:
    compressor = perceptron()
    train(compressor, 2)
    saved, before = save(compressor), everything(compressor)
    with torch.no_grad():
        compressor.optimizer.store.weight.fill_(7.0)
        for vector in compressor.optimizer.state:
            vector.values.fill_(7.0)
    load_(saved, compressor)
    assert_same(everything(compressor), before)


def test_the_learning_rate_of_a_loaded_state_is_set_again() -> None:
    """A setter skips a value that it set last; the load has changed it since."""
    compressor = perceptron()
    compressor.set_lr_(0.5)
    saved = save(compressor)
    compressor.set_lr_(0.25)
    load_(saved, compressor)
    assert float(compressor.scalars.lr) == 0.5
    compressor.set_lr_(0.25)
    assert float(compressor.scalars.lr) == 0.25


def test_tied_weights_come_back_tied() -> None:
    model = TiedNet()
    compressor = Compressor(model, 1e9, CompressorOptions(lr=1e-3))
    saved, before = save(compressor), everything(compressor)
    with torch.no_grad():
        model.embed.weight[:, 2] = 0
    compressor.event_()
    assert model.embed.weight.shape == (7, 5)
    load_(saved, compressor)
    assert_same(everything(compressor), before)
    assert model.head.weight is model.embed.weight
