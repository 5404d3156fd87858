"""The loss that each step of a course presses towards."""

import math

import pytest

from gaugelasso.compress.courses.course import Answer, Course
from tests.compress.courses.simulation import LR, at_trial, simulated


def test_nothing_is_pressed_before_a_loss_is_known() -> None:
    course = Course(400, LR, named=0.1)
    assert course.pressed_loss(50) is None
    course.observe([math.nan, math.inf])
    assert course.pressed_loss(50) is None
    course.observe([math.nan, 2.1, 1.0])
    assert course.pressed_loss(50) == pytest.approx(0.1 + 0.1 * 2.0)


@pytest.mark.parametrize(
    ("named", "first", "wanted"),
    [(0.001, 10.0, 0.1), (1.0, 5.0, 1.4), (2.0, 1.5, 2.0), (-1.0, 3.0, -0.6)],
    ids=["geometric mean", "a tenth of the way", "below from the start", "negative"],
)
def test_the_first_provisional_loss(named: float, first: float, wanted: float) -> None:
    course = Course(400, LR, named=named)
    course.observe([first])
    assert course.pressed_loss(50) == pytest.approx(wanted)


def test_a_trial_with_room_loosens_the_provisional_loss() -> None:
    course, answer = at_trial(loss=0.02)
    assert answer == Answer(keep=True)
    assert course.stage == "press"
    assert course.trials[0]["pressed_loss"] == pytest.approx(0.29)
    assert 0.4 < course.pressed_loss(120) <= 0.1 + 0.2 * 1.9


def test_a_narrow_trial_keeps_the_provisional_loss_close() -> None:
    roomy, _ = at_trial(loss=0.03)
    narrow, _ = at_trial(loss=0.099)
    assert 0.1 < narrow.provisional < 0.45 < roomy.provisional


def test_the_provisional_loss_grows_at_most_fourfold() -> None:
    course, _ = at_trial(loss=1e-6, before=2e-4, named=1e-4, first_loss=9.0)
    assert course.provisional == pytest.approx(4 * 2e-4)


def test_the_pressed_loss_of_the_anneal_falls_to_the_aim() -> None:
    run = simulated(shrinks=1.0).run()
    (_, begin, _) = run.stages[-1]
    pressed = [row["pressed"] for row in run.steps[begin:]]
    assert None not in pressed
    assert pressed[0] > 1.2 * run.course.named
    assert pressed[0] > pressed[75] > pressed[-1]
    assert pressed[-1] == pytest.approx(run.course.aim, rel=1e-3)


def test_the_anneal_presses_lower_where_selection_data_are_worse() -> None:
    def last_pressed(gap: float) -> float:
        run = simulated(shrinks=1.0, gap=gap).run()
        return run.course.pressed_loss(399) or math.nan

    level = last_pressed(0.0)
    assert last_pressed(0.03) == pytest.approx(level - 0.03, abs=0.006)
    assert last_pressed(-0.03) == pytest.approx(level, rel=1e-3)  # luck is no reason to press less


def test_the_pressed_loss_has_a_floor() -> None:
    course = Course(400, LR, named=0.1, stage="anneal", ends_at=400, first_loss=2.0, gap=5.0)
    assert course.pressed_loss(399) == pytest.approx(0.03)


def test_one_event_may_cost_a_tenth_or_a_hundredth_of_the_way() -> None:
    course = Course(400, LR, named=0.1, first_loss=10.0)
    assert course.allowance(0.1) == pytest.approx(0.01)
    assert course.allowance(5.0) == pytest.approx(0.05)
    assert course.allowance(12.0) == 0.0
