"""The last anneal, and the state that a run ends on."""

import json
import math
from typing import Any

import pytest

from gaugelasso.compress.courses.course import RELEASED, Course, Measure
from gaugelasso.compress.courses.stages import LEAST_RATE, RESTART
from tests.compress.courses.simulation import FULL, LR, at_trial, simulated


def landed(measure: Measure) -> list[bool]:
    """Whether each step of a landing presses towards the aim, not far below it."""
    where: dict[str, Any] = {"stage": "anneal", "began_at": 248, "advanced_at": 360, "ends_at": 400}
    course, pressed = Course(400, LR, named=0.1, first_loss=2.0, **where), []
    for step in range(360, 400):
        course.observe([0.09])
        towards = (course.pressed_loss(step) or 0.0) + max(course.gap or 0.0, 0.0)
        pressed.append(towards != pytest.approx(RELEASED * course.aim))
        if course.due(step + 1):
            course.advance(step + 1, 200.0, measure)
    return pressed


def test_the_landing_releases_pressure_while_the_loss_is_above_the_aim() -> None:
    assert landed(lambda thorough: 0.05) == [True] * 40
    assert landed(lambda thorough: 0.0995) == [True] * 4 + [False] * 36  # the aim is 1% below
    assert landed(lambda thorough: math.nan) == [True] * 4 + [False] * 36
    losses = iter([0.05] * 2 + [0.1] * 3 + [0.05] * 4)
    pressed = landed(lambda thorough: next(losses))
    assert pressed == [True] * 12 + [False] * 12 + [True] * 16


def test_states_that_hold_on_the_way_down_are_kept() -> None:
    """Of each size one; the run ends on it if the pressure goes too far."""
    where: dict[str, Any] = {"stage": "anneal", "began_at": 248, "advanced_at": 248, "ends_at": 400}
    course, kept, measured = Course(400, LR, named=0.1, first_loss=2.0, **where), [], []

    def measure(thorough: bool) -> float:
        measured.append(thorough)
        return 0.05

    for step in range(248, 400):
        course.observe([0.09])
        if course.due(step + 1):
            fma = 300.0 - 10 * (step // 50)
            answer = course.advance(
                step + 1, fma, lambda thorough: measured.append(thorough) or 0.05
            )
            kept += [step + 1] if answer.keep else []
    assert kept == [264, 300 + 12, 350 + 10]  # the first measurement after each cut
    assert (course.held_at, course.held_fma, course.held_loss) == (360, 230.0, 0.05)
    # A partial measurement is repeated in full where it would keep a state.
    assert measured.count(True) == 2 + 10


def test_a_work_target_that_is_met_starts_the_anneal() -> None:
    run = simulated().run(133)
    run.course.end_compression(133)
    assert run.course.stage == "anneal"
    run.run()
    assert (run.course.began_at, run.course.ends_at) == (133, 400)
    assert {row["phase"] for row in run.steps[133:]} == {"cooldown"}
    assert run.steps[133]["rate"] == pytest.approx(LR * (LEAST_RATE + RESTART * (1 - LEAST_RATE)))
    assert run.steps[-1]["rate"] == pytest.approx(LEAST_RATE * LR, rel=1e-2)
    run.course.end_compression(390)
    assert run.course.began_at == 133  # it began once


@pytest.mark.parametrize("named", [-2.0, 0.0])
def test_a_named_loss_that_is_not_positive(named: float) -> None:
    course = Course(400, LR, named=named)
    fma = FULL
    for step in range(400):
        course.observe([3 + (named - 3.5) * min(step / 60, 1)])
        assert math.isfinite(course.pressed_loss(step) or 0.0)
        if course.due(step + 1):
            course.advance(step + 1, fma, lambda thorough: named - 0.4)
            fma *= 0.999
    assert course.held_at == 396  # the last state that was measured on the way, and the smallest
    assert [row["selection_loss"] for row in course.trials] == [named - 0.4] * 3
    # Selection data are 0.1 above training data.
    assert course.pressed_loss(399) == pytest.approx(course.aim - 0.1)
    assert json.loads(json.dumps(course.to_dict(), allow_nan=False)) == course.to_dict()


def test_a_negative_loss_above_the_named_one_does_not_hold() -> None:
    course, answer = at_trial(loss=-1.0, before=-0.5, named=-2.0)
    assert course.held_at is None
    assert answer.return_to == 40
    assert "-1, above the named -2" in (course.in_doubt() or "")


def test_a_state_counts_as_held_where_other_data_have_the_loss_too() -> None:
    """Selection data are a sample: three standard errors below the target loss."""
    course = Course(400, LR, named=0.1, error=0.002)
    assert course.sure == pytest.approx(0.094)
    assert course._holds(100, 500.0, 0.097)  # better than nothing
    assert not course._holds(110, 400.0, 0.098)  # smaller, and less sure
    assert course._holds(120, 400.0, 0.095)
    assert course._holds(130, 450.0, 0.093)  # larger, and sure
    assert not course._holds(140, 300.0, 0.096)
    assert course._holds(150, 440.0, 0.094)
    assert (course.held_at, course.held_fma, course.held_loss) == (150, 440.0, 0.094)


@pytest.mark.parametrize(
    ("loss", "held", "stays"),
    [
        (0.093, (0.09, 400.0), True),
        (0.098, (0.09, 480.0), False),  # as small, and sure
        (0.098, (0.09, 600.0), True),  # sure, but much larger
        (0.098, (0.097, 480.0), True),
        (0.101, (0.09, 600.0), False),
        (math.nan, (0.09, 600.0), False),
    ],
)
def test_a_run_ends_on_the_surer_of_two_states(
    loss: float, held: tuple[float, float], stays: bool
) -> None:
    course = Course(400, LR, named=0.1, error=0.002, held_at=200)
    course.held_loss, course.held_fma = held
    assert course.stays(loss, 400.0) is stays
