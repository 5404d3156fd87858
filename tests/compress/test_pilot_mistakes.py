"""Mistakes in a loop of your own are named, before anything changes."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gaugelasso.compress import time_budget
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.distributed import Team
from gaugelasso.errors import UserError
from tests.compress.own_loops import Loop, Perceptron


class _TwoRanks(Team):
    size = 2


def test_a_step_after_the_last_is_refused() -> None:
    loop = Loop(named=9.0, steps=20)
    for _ in range(20):
        loop.step()
    calls = loop.calls
    with pytest.raises(UserError, match=r"step 21 of 20: all steps are taken; call finish\(\)"):
        loop.step()
    assert loop.calls == calls
    loop.compressor.finish()
    with pytest.raises(UserError, match=r"step after finish\(\)"):
        loop.step()


def test_finish_before_the_end_is_said() -> None:
    loop = Loop(named=1e9, steps=40)
    for _ in range(7):
        loop.step()
    assert not loop.compressor.done
    with pytest.warns(UserWarning, match=r"finish\(\) after 7 of 40 steps: the anneal is not over"):
        assert loop.compressor.finish().held


def test_finish_without_steps_is_refused() -> None:
    loop = Loop()
    assert not loop.compressor.done
    with pytest.raises(UserError, match="give Compressor the number of its steps"):
        loop.compressor.finish()


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"steps": 100, "seconds": 3.0}, UserError, "either steps or seconds, not both"),
        ({"steps": 19}, UserError, "steps = 19: must be a whole number of at least 20"),
        ({"steps": 100.0}, UserError, r"steps = 100\.0: must be a whole number"),
        ({"steps": True}, UserError, "steps = True: must be a whole number"),
        ({"seconds": 0.0}, UserError, r"seconds = 0.0: must be more than 0"),
        ({"seconds": math.inf}, UserError, "seconds = inf: must be a finite number"),
        (
            {"seconds": 9.0, "team": _TwoRanks()},
            UserError,
            "seconds = 9.0: .* 2 ranks .* give steps",
        ),
        ({"seconds": "3"}, TypeError, "seconds = '3': must be a number"),
        ({"evaluate": lambda: 1.0}, UserError, "evaluate needs the length of the run: give steps"),
        ({"fma_target": 0.5, "steps": 100}, UserError, "fma_target = 0.5: no cut leads below 11 "),
        ({"record": "runs/mine"}, UserError, "record needs the length of the run: give steps"),
        ({"steps": 100, "evaluate": 0.5}, TypeError, "evaluate = 0.5: must be a function"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_a_mistake_is_named(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Compressor(Perceptron(8, 4, 3), 0.5, **given)


@pytest.mark.parametrize(
    ("returned", "error", "said"),
    [
        (None, TypeError, "evaluate returned None; it must return the loss on held-out data"),
        (torch.zeros(2), TypeError, r"evaluate returned tensor\(\[0\., 0\.\]\); it must return"),
        (math.nan, UserError, "evaluate returned a loss of NaN before the first step"),
    ],
    ids=["none", "vector", "nan"],
)
def test_a_wrong_evaluate_is_found_before_the_first_step(
    returned: Any, error: type[Exception], said: str
) -> None:
    loop = Loop(steps=40, evaluate=lambda: returned)
    with pytest.raises(error, match=said):
        loop.step()
    assert loop.compressor.steps == loop.calls == 0


def test_the_trial_of_evaluate_changes_no_random_numbers() -> None:
    def drawn() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    def seed() -> None:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)

    loop = Loop(steps=40, evaluate=lambda: sum(drawn()))
    seed()
    loop.step()
    after = drawn()
    seed()
    assert after == drawn()


def test_the_trial_of_evaluate_changes_no_mode() -> None:
    """A model in eval mode is refused with `evaluate` as without it; parts of one may be in it."""
    loop = Loop(named=1e9, steps=40, evaluate=True)
    loop.model.eval()
    with pytest.raises(UserError, match="the model is in eval mode"):
        loop.step()
    loop.model.train()
    loop.model.frozen = torch.nn.Dropout().eval()
    loop.run()
    assert loop.model.training
    assert not loop.model.frozen.training


def test_the_trial_of_evaluate_leaves_the_gradients_of_the_batch() -> None:
    """It comes between the backward pass of a loop and its first step."""

    def evaluate() -> float:
        loop.model.zero_grad()
        return 1.0

    loop = Loop(steps=40, evaluate=evaluate)
    loss = loop.loss(loop.batch())
    loss.backward()
    before = loop.model.up.detach().clone()
    loop.compressor.step(loss)
    assert loop.compressor.steps == 1
    assert not torch.equal(loop.model.up, before)


def test_the_time_of_the_trial_is_not_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time_budget.time, "monotonic", lambda: clock[0])

    def evaluate() -> float:
        clock[0] += 5.0
        return 1.0

    loop = Loop(seconds=10.0, evaluate=evaluate)
    loop.step()
    assert loop.pilot.now == 0


def test_gradients_that_are_not_of_the_batch_are_refused() -> None:
    loop = Loop(steps=40)

    def loss_and_backward() -> torch.Tensor:
        loss = loop.loss(loop.batch())
        loss.backward()
        return loss

    with pytest.raises(UserError, match=r"given to step returns the loss and must not call back"):
        loop.compressor.step(loss_and_backward)
    with pytest.raises(UserError, match=r"call model\.zero_grad\(\)"):
        loop.step()
    loop.model.zero_grad()
    loop.step()
    assert loop.compressor.steps == 1


def test_an_interrupted_backward_pass_leaves_no_gradients() -> None:
    def interrupt(_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    loop = Loop(steps=40)
    hook = loop.model.up.register_hook(interrupt)  # after the gradient of `down`
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    hook.remove()
    loop.step()
    assert loop.compressor.steps == 1


@pytest.mark.parametrize(
    "loss", [lambda: 0.5, lambda: None, lambda: torch.tensor(0.5)], ids=["float", "none", "plain"]
)
def test_a_function_without_a_loss_is_refused(loss: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=r"function given to step returned .*; it must return the"):
        Loop(steps=20).compressor.step(loss)


@pytest.mark.parametrize("loss", [math.nan, math.inf, "low"])
def test_a_loss_to_press_towards_must_be_a_number(loss: Any) -> None:
    compressor = Loop().compressor
    with pytest.raises((UserError, TypeError), match="loss_target = "):
        compressor.set_loss_target_(loss)


def test_a_loss_to_press_towards_bounds_what_an_event_may_cost() -> None:
    compressor = Compressor(Perceptron(8, 4, 3), 0.5, CompressorOptions(drop_tolerance=0.1))
    assert compressor._allowances[0] == pytest.approx(0.05)
    compressor.set_loss_target_(-2.0)
    assert float(compressor.scalars.loss_target) == -2.0
    assert compressor._allowances[0] == pytest.approx(0.2)
    compressor.set_loss_target_(2.0, allowance=0.01)
    assert compressor._allowances[0] == 0.01
    compressor.set_loss_target_(2.0, allowance=5.0)
    assert compressor._allowances[0] == pytest.approx(0.2)
