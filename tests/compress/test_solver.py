"""rho against its formula, and the cases in which it must be zero."""

import pytest
import torch
from torch import Tensor

from gaugelasso.compress.solver import RhoSolver, smooth_
from tests.toys import exact

LR = exact(0.1)
GOOD = torch.tensor(True)
MOMENTUM = exact([1.0, -2.0, 0.5])
# <sign m, r> = -3 - 1 + 2 = -2, ||m||_1 = 3.5
PENALTY = exact([-3.0, 1.0, 2.0])


def rho(method: str, loss: float, gradient: Tensor = PENALTY, target: float = 1.0) -> float:
    solver = RhoSolver(method, target, rho=0.25)
    return float(solver.solve(exact(loss), LR, MOMENTUM, gradient))


def test_conservative_spends_the_margin() -> None:
    assert rho("conservative", loss=0.4) == pytest.approx((1 - 0.4) / (0.1 * 2))


def test_sign_step_spends_the_predicted_gain_too() -> None:
    assert rho("sign_step", loss=0.4) == pytest.approx((1 - 0.4 + 0.1 * 3.5) / (0.1 * 2))


def test_sign_step_may_press_above_the_target() -> None:
    assert rho("sign_step", loss=1.2) == pytest.approx((1 - 1.2 + 0.1 * 3.5) / (0.1 * 2))


@pytest.mark.parametrize(("method", "loss"), [("conservative", 1.01), ("sign_step", 1.36)])
def test_no_margin_no_pressure(method: str, loss: float) -> None:
    assert rho(method, loss) == 0


@pytest.mark.parametrize("opposition", [0.019, 0.0, -1.0])
def test_margin_is_spent_even_where_descent_does_not_oppose_the_penalty(opposition: float) -> None:
    """Opposition counts as at least 2% of the penalty's 1-norm."""
    # -<sign m, r> = 2 opposition, ||r||_1 = 2
    gradient = exact([1 - opposition, 1 + opposition, 0])
    assert rho("conservative", loss=0.4, gradient=gradient) == pytest.approx(0.6 / (0.1 * 0.04))


def test_without_a_penalty_there_is_nothing_to_press_with() -> None:
    assert rho("conservative", loss=0.4, gradient=0 * PENALTY) == 0


def test_a_loss_that_is_not_a_number_presses_nothing() -> None:
    assert rho("conservative", loss=float("nan")) == 0


@pytest.mark.parametrize("loss", [0.4, 5.0])
def test_fixed_ignores_the_target(loss: float) -> None:
    assert rho("fixed", loss) == 0.25


def test_conservative_step_lands_on_the_target() -> None:
    """Along sign descent, the loss to first order after the step is the target."""
    strength = rho("conservative", loss=0.4)
    predicted = 0.4 - float(LR * torch.dot(MOMENTUM.sign(), strength * PENALTY))
    assert predicted == pytest.approx(1.0)


def smoothed(average: Tensor, seen: Tensor, loss: float, beta: float) -> float:
    smooth_(average, seen, exact(loss), beta, GOOD)
    return float(average)


def test_smoothing_is_an_exponential_average_from_the_first_loss() -> None:
    average, seen = torch.zeros(()).double(), torch.zeros(()).double()
    values = [smoothed(average, seen, x, 0.9) for x in (2.0, 1.0, 4.0)]
    assert values == pytest.approx([2.0, 0.9 * 2.0 + 0.1, 0.9 * 1.9 + 0.1 * 4.0])
    assert seen == 3


def test_without_smoothing_the_loss_passes_through() -> None:
    average, seen = torch.zeros(()).double(), torch.zeros(()).double()
    assert [smoothed(average, seen, x, 0.0) for x in (2.0, 1.0, 4.0)] == [2.0, 1.0, 4.0]


def test_without_smoothing_an_overflowed_loss_is_forgotten() -> None:
    average, seen = torch.zeros(()).double(), torch.zeros(()).double()
    smooth_(average, seen, exact(float("inf")), 0.0, ~GOOD)
    assert seen == 0
    assert smoothed(average, seen, 2.0, 0.0) == 2.0
