"""What a checkpoint keeps of a course."""

import json
import math
from typing import Any

import pytest

from gaugelasso.compress.courses.course import Course
from gaugelasso.errors import UserError
from tests.compress.courses.simulation import LR, simulated


@pytest.mark.parametrize("at", [1, 19, 71, 80, 103, 104, 105, 170, 177, 248, 300, 385])
def test_a_course_goes_on_from_a_checkpoint(at: int) -> None:
    """Of a run with all kinds of trials."""
    settings: dict[str, Any] = {"named": 0.06, "shrinks": 0.93, "heat": 1.0}
    whole = simulated(**settings).run()
    assert any(answer.return_to for _, answer in whole.answers)
    first = simulated(**settings).run(at)
    text = json.dumps(first.course.to_dict(), allow_nan=False)
    second = simulated(**settings, at=at, fma=first.fma, kept=first.kept)
    second.course.load_(json.loads(text))
    assert second.course == first.course
    second.run()
    assert second.steps == whole.steps[at:]
    assert second.course == whole.course


def test_what_is_kept_does_not_change_with_the_course() -> None:
    run = simulated().run(110)
    kept = run.course.to_dict()
    text = json.dumps(kept)
    run.run()
    assert json.dumps(kept) == text
    again = Course(400, LR, named=0.1)
    again.load_(kept)
    again.observe([1.0])
    again.trials.clear()
    assert json.dumps(kept) == text


DAMAGED: list[tuple[str, Any]] = [
    ("stage", "flight"),
    ("stage", None),
    ("began_at", None),
    ("ends_at", "80"),
    ("ends_at", 10**9),
    ("advanced_at", -1),
    ("advanced_at", 2.5),
    ("provisional", None),
    ("provisional", math.nan),
    ("fall", math.inf),
    ("released", 1),
    ("released", None),
    ("recent", 0.5),
    ("recent", ["a"]),
    ("recent", [math.nan]),
    ("recent", [None]),
    ("deferred", None),
    ("deferred", [math.nan]),
    ("trials", {}),
    ("trials", [1]),
    ("trials", [{}]),
    ("trials", [{"step": 104, "selection_loss": "low"}]),
    ("good_at", True),
    ("good_at", 1.5),
    ("good_fma", "inf"),
    ("held_at", -4),
    ("first_loss", "2"),
]


@pytest.mark.parametrize(("name", "value"), DAMAGED, ids=lambda value: str(value))
def test_a_damaged_value_is_refused_and_changes_nothing(name: str, value: Any) -> None:
    kept = simulated().run(110).course.to_dict()
    course = Course(400, LR, named=0.1)
    with pytest.raises(UserError, match=f"course: {name} = "):
        course.load_({**kept, name: value})
    assert course == Course(400, LR, named=0.1)


@pytest.mark.parametrize("values", [{}, [], None, "course"], ids=str)
def test_what_is_no_table_of_values_is_refused(values: Any) -> None:
    with pytest.raises(UserError, match="course"):
        Course(400, LR, named=0.1).load_(values)
