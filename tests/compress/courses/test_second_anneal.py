"""A last anneal that will miss is given up for a second one, from a larger state."""

import json
import math
from typing import Any

import pytest

from gaugelasso.compress.courses.course import Answer, Course
from gaugelasso.compress.courses.second_anneal import EARLY, JUDGED, SECOND, TREND
from tests.compress.courses.simulation import LR, Simulated, simulated

LARGER: dict[str, Any] = {"best_trial_at": 104, "best_trial_fma": 500.0, "best_trial_loss": 0.12}
NOTHING_ELSE: dict[str, Any] = {"best_trial_at": None, "best_trial_loss": math.inf}
HELD: dict[str, Any] = {"held_at": 176, "held_fma": 400.0, "held_loss": 0.08}


def in_anneal(early: float, late: float, **fields: Any) -> tuple[Course, list[tuple[int, Answer]]]:
    """A course of 400 steps in its last anneal; its selection loss at both points of judgement."""
    known = {"stage": "anneal", "began_at": 248, "advanced_at": 248, "ends_at": 400, "fall": 1.0}
    known |= {"named": 0.1, "first_loss": 2.0}
    course, answers = Course(400, LR, **(known | LARGER | fields)), []
    middle = 248 + (EARLY + JUDGED) / 2 * 152
    for step in range(248, 355):  # before the landing
        loss = early if step < middle else late
        course.observe([loss])
        if course.due(step + 1):
            answer = course.advance(step + 1, 200.0, lambda thorough, loss=loss: loss)
            answers += [(step + 1, answer)] if answer != Answer() else []
            if answer.second_anneal:
                course.begin_second_anneal(step + 1)
    return course, answers


def test_an_anneal_that_will_miss_gives_way_to_one_from_the_best_trial() -> None:
    course, answers = in_anneal(0.3, 0.25)
    assert answers == [(344, Answer(return_to=104, second_anneal=True))]
    assert (course.second_anneal_at, course.stage, course.began_at, course.ends_at) == (
        344, "anneal", 344, 400,
    )  # fmt: skip
    expected = 0.25 * (0.25 / 0.3) ** TREND
    assert f"stands at a loss of 0.25 and would end at about {expected:.4g}, above 0.1" in (
        answers[0][1].reason
    )
    # What the larger state has to spare is not known, so nothing presses on it.
    assert course.pressed_loss(345) is None


def test_a_state_that_held_comes_first_and_is_pressed_further() -> None:
    course, answers = in_anneal(0.3, 0.25, **HELD)
    assert answers == [(344, Answer(return_to=176, second_anneal=True))]
    assert course.pressed_loss(345) is not None


@pytest.mark.parametrize(
    ("early", "late", "fields"),
    [
        pytest.param(0.3, 0.12, {}, id="it falls fast enough"),
        pytest.param(0.15, 0.126, {}, id="it nearly falls fast enough"),  # to 0.10
        pytest.param(0.3, 0.25, NOTHING_ELSE, id="no other state"),
        pytest.param(0.3, 0.25, {"best_trial_loss": 0.2}, id="the other is out of reach"),
        pytest.param(0.3, 0.25, {"best_trial_fma": 200.0}, id="the other is no larger"),
        pytest.param(0.3, math.nan, {}, id="no loss"),
        pytest.param(0.3, 0.25, {"second_anneal_at": 260}, id="this is the second one"),
    ],
)  # fmt: skip
def test_it_goes_on(early: float, late: float, fields: dict[str, Any]) -> None:
    course, answers = in_anneal(early, late, **fields)
    assert answers == []
    assert course.began_at == 248


def test_a_short_anneal_is_not_judged() -> None:
    """Both points would be one measurement, and next to no steps would be left."""
    course = Course(400, LR, named=0.1, first_loss=2.0, stage="anneal", began_at=320, ends_at=400,
                    advanced_at=320, **LARGER)  # fmt: skip
    for step in range(320, 400):
        course.observe([0.5])
        if course.due(step + 1):
            answer = course.advance(step + 1, 200.0, lambda thorough: 0.25)
            assert answer == Answer()


@pytest.mark.parametrize("late", [2.53, 2.2])
def test_a_loss_with_a_floor_is_judged_by_the_way_to_it(late: float) -> None:
    """Ten percent of such a loss are more than an anneal lowers it."""
    fields = {"best_trial_loss": 2.1, "first_loss": 6.0, "named": 2.1}
    answers = in_anneal(2.55, late, **fields)[1]
    assert any(answer.second_anneal for _, answer in answers) is (late == 2.53)


def test_without_the_state_to_return_to_the_anneal_goes_on() -> None:
    """The driver begins a second anneal only once the state is back."""
    course = simulated().run(343).course
    began = course.began_at
    answer = course.advance(344, 243.0, lambda thorough: 0.2)
    assert answer.second_anneal
    assert (course.began_at, course.second_anneal_at) == (began, None)


def test_a_loss_that_follows_the_pressed_one_is_on_its_way() -> None:
    """Pressure holds it there, and falls with the rate."""
    pressed = in_anneal(0.13, 0.126)[0].pressed_loss(344) or 0.0
    assert in_anneal(0.13, 1.09 * pressed)[1] == []
    assert in_anneal(0.13, 1.11 * pressed)[1] != []


def test_the_other_state_must_have_the_loss_in_reach() -> None:
    reach = 0.1 * math.exp(SECOND * 0.7)  # the whole last anneal: 0.7 of a trial's fall of 1
    assert in_anneal(0.3, 0.25, best_trial_loss=0.99 * reach)[1] != []
    assert in_anneal(0.3, 0.25, best_trial_loss=1.01 * reach)[1] == []


def test_the_trial_of_the_least_loss_is_kept() -> None:
    run = simulated(named=0.09, heat=2.0).run()
    best = min(run.course.trials, key=lambda row: row["selection_loss"])
    assert (run.course.best_trial_at, run.course.best_trial_loss) == (
        best["step"],
        best["selection_loss"],
    )
    assert run.kept[best["step"]] == run.course.best_trial_fma
    assert 104 in simulated(named=0.09, heat=2.0).run(120).course.kept_steps()


def test_a_run_that_turns_ends_smaller_than_the_state_that_held() -> None:
    """Without a second anneal it would end on the state of 545 FMA whose trial held."""
    run = simulated().run()
    assert run.course.second_anneal_at == 344
    assert run.course.held_loss <= 0.1
    assert run.course.held_fma < 400


def test_a_checkpoint_on_either_side_of_the_turn_changes_nothing() -> None:
    whole = simulated().run()
    for at in (330, 350):
        first = simulated().run(at)
        text = json.dumps(first.course.to_dict(), allow_nan=False)
        second = Simulated(Course(400, LR, named=0.1), at=at, fma=first.fma, kept=first.kept)
        second.course.load_(json.loads(text))
        second.run()
        assert (second.fma, second.course.held_at) == (whole.fma, whole.course.held_at)


def test_a_checkpoint_from_before_there_was_a_second_anneal_loads() -> None:
    new = {"best_trial_at", "best_trial_fma", "best_trial_loss", "early_loss", "second_anneal_at"}
    values = {k: v for k, v in simulated().run(300).course.to_dict().items() if k not in new}
    course = Course(400, LR, named=0.1)
    course.load_(values)
    assert (course.stage, course.best_trial_at, course.best_trial_loss) == (
        "anneal",
        None,
        math.inf,
    )
