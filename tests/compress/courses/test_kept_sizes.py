"""States of several sizes, which a run that names a metric may return to; the stalled anneal."""

import itertools
import json
from typing import Any

import pytest

from gaugelasso.compress.courses.course import LEAST_STALL, STALLED, Course
from gaugelasso.compress.courses.metric import FAR, LOOK, RUNG, RUNGS, MetricCourse
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.errors import UserError
from tests.compress.courses.simulation import LR, never


def with_metric(steps: int = 400, **fields: Any) -> MetricCourse:
    """A course to a metric of 0.9 at a loss of at most 0.1, which has begun to learn."""
    known = {"first_loss": 2.0, "recent": [0.1] * 60} | fields
    return MetricCourse(steps=steps, lr=LR, goal=MetricTarget(0.9, loss=0.1), **known)


def in_last_anneal(**fields: Any) -> MetricCourse:
    where = {"stage": "anneal", "began_at": 248, "advanced_at": 248, "ends_at": 400}
    return with_metric(**({**where, "rungs": [(20, 900.0), (40, 600.0), (60, 480.0)]} | fields))


def looked_at(course: MetricCourse, loss: float, fma: float) -> list[tuple[int, int | None]]:
    """Every answer with a return: its step, and the state to return to."""
    found = []
    for step in range(248, 400):
        course.observe([loss])
        if course.due(step + 1):
            answer = course.advance(step + 1, fma, lambda thorough: loss)
            if answer.return_to is not None:
                assert f"{fma:,.0f} FMA" in answer.reason
                assert f"{loss:.4g}" in answer.reason
                found.append((step + 1, answer.return_to))
    return found


def test_a_state_is_kept_each_time_that_the_work_has_fallen_by_a_factor() -> None:
    course, kept = with_metric(), []
    for number, step in enumerate(range(24, 80, 4)):
        fma = 1000.0 * 0.9**number
        if course.advance(step, fma, lambda thorough: 0.5).keep:
            kept.append(fma)
    assert kept[0] == 1000.0
    assert len(kept) > RUNGS
    assert all(RUNG <= a / b < RUNG / 0.9 for a, b in itertools.pairwise(kept))
    assert [fma for _, fma in course.rungs] == kept[-RUNGS:]
    assert course.kept_steps() == [course.good_at, *(step for step, _ in course.rungs[:-1])]


def test_nothing_is_kept_above_the_first_provisional_loss() -> None:
    course = with_metric(recent=[1.5] * 60)
    assert not course.advance(40, 800.0, lambda thorough: 0.5).keep
    assert course.rungs == []
    assert course.good_at is None


def test_a_first_trial_that_fails_returns_to_the_next_larger_state() -> None:
    course = with_metric(rungs=[(20, 900.0), (40, 600.0), (60, 480.0)], good_at=60, good_fma=480.0)
    course.advance(80, 470.0, lambda thorough: 5.0)
    assert course.stage == "trial"
    answer = course.advance(course.ends_at, 470.0, lambda thorough: 5.0)
    assert answer.return_to == course.good_at == 40  # 480 is hardly larger than 470
    assert course.good_fma == 600.0


def test_the_last_anneal_is_given_up_once_for_a_larger_state() -> None:
    course = in_last_anneal()
    ((step, state),) = looked_at(course, loss=5.0, fma=450.0)
    look = 248 + LOOK * (400 - 248)
    assert look <= step < look + course.grain
    assert state == 40
    assert course.given_up
    assert course.began_at == step
    assert course.stage == "anneal"
    assert course.kept_steps() == []
    # A new anneal begins at the rate of the first.
    assert course.rate(step) == MetricCourse.rate(in_last_anneal(), 248)


@pytest.mark.parametrize(
    ("loss", "fma", "fields"),
    [
        (0.1, 450.0, {}),  # within reach
        (5.0, 800.0, {}),  # nothing clearly larger was kept
        (5.0, 450.0, {"rungs": []}),
        (5.0, 450.0, {"held_at": 300, "held_fma": 470.0, "held_loss": 0.05}),
    ],
)
def test_the_last_anneal_goes_on(loss: float, fma: float, fields: dict[str, Any]) -> None:
    course = in_last_anneal(**fields)
    assert looked_at(course, loss, fma) == []
    assert not course.given_up


def test_what_is_far_is_measured_against_the_pressed_loss() -> None:
    step = 248 + round(LOOK * (400 - 248)) + 3
    pressed = in_last_anneal().pressed_loss(step)
    assert pressed is not None
    assert looked_at(in_last_anneal(), 0.8 * FAR * pressed, 450.0) == []
    assert len(looked_at(in_last_anneal(), 1.5 * FAR * pressed, 450.0)) == 1


def test_a_checkpoint_brings_the_states_back() -> None:
    course, other = in_last_anneal(given_up=True), in_last_anneal(rungs=[])
    other.load_(json.loads(json.dumps(course.to_dict())))
    assert other.rungs == course.rungs
    assert other.given_up


def test_a_checkpoint_without_them_is_read() -> None:
    older = in_last_anneal().to_dict()
    for name in ("rungs", "given_up", "present_fma", "cut_at"):
        del older[name]
    course = in_last_anneal()
    course.load_(older)
    assert course.rungs == []
    assert not course.given_up
    assert course.cut_at == 0
    assert course.present_fma == float("inf")


@pytest.mark.parametrize(
    "rungs",
    [None, "x", [3], [[1]], [[1, 2, 3]], [[-1, 2.0]], [[500, 2.0]], [[1.5, 2.0]], [[1, "x"]]],
)
def test_damaged_states_are_refused(rungs: Any) -> None:
    course = in_last_anneal()
    with pytest.raises(UserError, match="rungs"):
        course.load_({**course.to_dict(), "rungs": rungs})


# --- an anneal that cuts nothing -----------------------------------------------------------


def anneal_of(steps: int, works: list[float], loss: float = 0.12) -> list[bool]:
    """Whether each step of a last anneal is released; `works` are the FMA at each grain."""
    began = steps // 2
    where: dict[str, Any] = {"stage": "anneal", "began_at": began, "ends_at": steps}
    course = Course(steps, LR, named=0.1, first_loss=2.0, advanced_at=began, **where)
    released, each = [], iter(works)
    for step in range(began, round(0.89 * steps)):
        course.observe([loss])
        if course.due(step + 1):
            course.advance(step + 1, next(each), lambda thorough: loss)
        released.append(course.released)
    return released


def test_pressure_that_cuts_nothing_lets_go() -> None:
    steps = 4000
    stalled = anneal_of(steps, [500.0] * 100)
    first = stalled.index(True)
    assert STALLED * steps <= first <= 2 * STALLED * steps
    assert all(stalled[first:])


def test_pressure_that_cuts_goes_on() -> None:
    assert not any(anneal_of(4000, [500.0 - i for i in range(100)]))
    assert not any(anneal_of(4000, [500.0] * 100, loss=0.05))  # or that has its loss


def test_a_short_run_has_too_few_events_to_tell() -> None:
    assert STALLED * 400 < LEAST_STALL
    assert anneal_of(400, [500.0] * 100).index(True) >= LEAST_STALL - 4


def test_a_named_loss_alone_keeps_no_sizes() -> None:
    course = Course(400, LR, named=0.1, first_loss=2.0, recent=[0.1] * 60)
    kept = [step for step in range(24, 80, 4) if course.advance(step, 900.0 - step, never).keep]
    assert kept == [24]
