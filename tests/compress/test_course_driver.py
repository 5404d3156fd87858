"""What the driver of a course does with an answer that asks for a second anneal."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from gaugelasso.compress.course_driver import CourseDriver
from gaugelasso.compress.courses.course import Course
from gaugelasso.compress.courses.second_anneal import Answer

ASKED = Answer(return_to=104, second_anneal=True, reason="it would miss")


@pytest.mark.parametrize(
    ("found", "frozen_at", "begins"),
    [
        pytest.param(104, None, True, id="the state is there"),
        pytest.param(None, None, False, id="the state is gone"),
        pytest.param(104, 300, False, id="a work target is met"),
    ],
)
def test_a_second_anneal_begins_once_the_state_is_back(
    found: int | None, frozen_at: int | None, begins: bool
) -> None:
    """Without the state the first anneal goes on; a larger state would miss a met work target."""
    where: dict[str, Any] = {"stage": "anneal", "began_at": 248, "ends_at": 400}
    course = Course(400, 0.01, named=0.1, best_trial_at=104, **where)
    compressor = SimpleNamespace(steps=344, fma=200.0, work_target_met=frozen_at is not None)
    states: Any = SimpleNamespace(
        compressor=compressor, find=lambda names: found, step_of=lambda name: name
    )
    driver = CourseDriver(course, states, mock.Mock(), mock.Mock(), skip_limit=3)
    driver.frozen_at = frozen_at
    with (
        mock.patch.object(course, "advance", return_value=ASKED),
        mock.patch.object(driver, "return_to") as returned,
    ):
        driver.decide(due=True)
    assert returned.called is begins
    assert (course.second_anneal_at, course.began_at) == ((344, 344) if begins else (None, 248))
