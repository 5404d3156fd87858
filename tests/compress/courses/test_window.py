"""The window of losses, and the loss that is aimed at."""

import math
import random

import pytest

from gaugelasso.compress.courses.window import LEAST_ROOM, MOST_ROOM, LossWindow, Measured


def room(losses: list[float], named: float = 0.1) -> float:
    """The share of the target loss by which the aim is below it."""
    window = LossWindow(named=named)
    window.observe(losses)
    return 1 - window.aim / named


def noisy(noise: float, fall: float = 0.0) -> list[float]:
    draw = random.Random(0)
    return [math.exp(draw.gauss(0, noise) - fall * i) for i in range(200)]


def test_the_aim_is_below_the_named_loss_by_the_noise() -> None:
    rooms = [room(noisy(noise)) for noise in (0.0, 0.01, 0.1, 0.2, 3.0)]
    assert rooms == sorted(rooms)
    assert rooms[0] == rooms[1] == pytest.approx(LEAST_ROOM)
    assert rooms[2] == pytest.approx(0.052, rel=0.2)  # three standard errors of 33 losses
    assert rooms[3] == pytest.approx(2 * rooms[2], rel=0.01)
    assert rooms[4] == pytest.approx(MOST_ROOM)
    assert room([]) == room([0.5]) == pytest.approx(LEAST_ROOM)


def test_a_falling_loss_is_no_noise() -> None:
    assert room(noisy(0.0, fall=0.05)) == pytest.approx(LEAST_ROOM)
    assert room(noisy(0.1, fall=0.05)) == pytest.approx(room(noisy(0.1)), rel=1e-6)


def test_the_aim_is_below_a_negative_loss_too() -> None:
    window = LossWindow(named=-2.0)
    window.observe([-1.0, -1.5])
    assert window.aim == pytest.approx(-2.02)


def test_the_loss_is_a_mean_of_the_last_finite_ones() -> None:
    window = LossWindow(named=0.1)
    assert window.loss == math.inf
    window.observe([math.nan, 9.0, *[5.0] * 100])
    window.observe([math.inf, *[1.0] * 32, math.nan])
    assert window.first_loss == 9.0
    assert window.loss == pytest.approx((32 * 1.0 + 5.0) / 33)
    assert len(window.recent) == 60


def test_losses_that_are_deferred_decide_nothing_before_the_next_are_read() -> None:
    at_once, later = LossWindow(named=0.1), LossWindow(named=0.1)
    losses = noisy(0.2)
    at_once.observe(losses)
    fresh = (later.loss, later.aim)
    later.defer(losses[:150])
    later.defer([math.nan, *losses[150:190]])
    assert (later.loss, later.aim, later.first_loss) == (*fresh, None)
    later.observe(losses[190:])
    assert later == at_once


def test_the_aim_stays_below_by_the_noise_of_selection_data() -> None:
    course = LossWindow(named=0.1)
    assert course.aim == pytest.approx(0.1 * (1 - LEAST_ROOM))
    course.seen(Measured(0.2, 0.0, 0.002))
    assert course.aim == pytest.approx(0.1 - 3 * 0.002)
    course.seen(Measured(0.2, 0.0))  # of unknown error
    assert course.aim == pytest.approx(0.1 - 3 * 0.002)
    course.seen(Measured(0.2, 0.0, 0.5))
    assert course.aim == pytest.approx(0.1 * (1 - MOST_ROOM))
