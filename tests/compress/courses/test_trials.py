"""What a course does after a trial."""

import json
import math

import pytest

from gaugelasso.compress.courses.course import TIGHTEST, Answer, Course
from tests.compress.courses.simulation import FULL, LR, at_trial, never, simulated


def test_the_state_before_trials_is_kept_where_the_provisional_loss_is_reached() -> None:
    run = simulated(floor=0.005).run(80)
    ((step, answer),) = run.answers
    assert answer == Answer(keep=True)
    assert (run.course.good_at, run.course.good_fma) == (step, run.kept[step])
    course = Course(400, LR, named=0.1)
    course.observe([2.0] * 40)
    assert course.advance(40, FULL, never) == Answer()
    assert course.good_at is None


def test_a_failed_trial_returns_to_the_kept_state_and_tightens() -> None:
    course, answer = at_trial(loss=0.5, before=1.2)
    assert answer == Answer(keep=False, return_to=40)
    assert (course.good_at, course.good_fma) == (40, 900.0)
    assert course.held_at is None
    used = course.trials[0]["pressed_loss"]
    assert used == pytest.approx(0.29)
    assert course.provisional == pytest.approx(0.7 * used)
    assert course.recent == []  # losses of another state


def test_it_tightens_by_half_of_the_way_at_most() -> None:
    """Losses that never come near zero have a floor."""
    course, answer = at_trial(loss=4.0, before=6.0, named=2.0, first_loss=10.0)
    assert answer.return_to == 40
    used = course.trials[0]["pressed_loss"]
    assert used == pytest.approx(2.8)
    assert course.provisional == pytest.approx((used + 2.0) / 2)
    assert course.provisional > 0.7 * used


def test_a_provisional_loss_that_was_too_loose_is_never_used_again() -> None:
    course, _ = at_trial(loss=0.5, before=1.2)
    tight = course.provisional
    course.observe([tight] * 60)
    course.advance(course.ends_at, 800.0, never)
    course.advance(course.ends_at, 800.0, lambda thorough: 0.001)
    assert len(course.trials) == 2
    assert course.good_fma == 800.0
    assert course.provisional <= tight


def test_a_narrow_miss_of_an_early_trial_does_not_go_back() -> None:
    """The same miss at the last trial does: less time is left to learn."""
    early, answer = at_trial(loss=0.13)
    assert answer == Answer(keep=True)
    assert (early.good_at, early.held_at) == (104, None)
    late = Course(400, LR, named=0.1, first_loss=2.0, good_at=40, good_fma=900.0)
    late.observe([0.3] * 60)
    late._enter("press", 180, 44)
    late.advance(224, 500.0, never)
    assert late.advance(248, 500.0, lambda thorough: 0.16).return_to == 40
    _, answer = at_trial(loss=0.16)
    assert answer == Answer(keep=True)


def test_a_trial_of_the_same_size_does_not_go_back() -> None:
    """The kept state has no better chance."""
    course, answer = at_trial(loss=0.9, fma=900.0)
    assert answer == Answer(keep=True)
    assert (course.good_at, course.held_at) == (104, None)


def test_without_a_kept_state_a_failed_trial_goes_on() -> None:
    _, answer = at_trial(loss=0.9, good_at=None, good_fma=math.inf)
    assert answer == Answer(keep=True)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_trial_without_a_loss_has_failed(loss: float) -> None:
    course, answer = at_trial(loss=loss)
    assert answer.return_to == 40
    assert course.trials[0]["selection_loss"] is None
    assert course.in_doubt() is None
    # An anneal that led to nothing promises nothing: as tight as one failure allows.
    assert course.pressed_loss(130) == pytest.approx(TIGHTEST * course.trials[0]["pressed_loss"])


def test_a_course_without_any_loss_goes_on() -> None:
    course = Course(400, LR, named=0.1)
    for step in range(400):
        course.observe([math.nan])
        assert course.pressed_loss(step) is None
        if course.due(step + 1):
            course.advance(step + 1, FULL, lambda thorough: math.nan)
    assert course.stage == "anneal"
    Course(400, LR, named=0.1).load_(json.loads(json.dumps(course.to_dict(), allow_nan=False)))


def test_the_smallest_state_whose_trial_held_is_known() -> None:
    run = simulated(floor=0.01, shrinks=0.96).run()
    held = [row for row in run.course.trials if row["selection_loss"] <= 0.1]
    assert held
    least = min(held, key=lambda row: row["fma"])
    assert (run.course.held_at, run.course.held_fma) == (least["step"], least["fma"])
    assert run.kept[least["step"]] == least["fma"]


def test_a_larger_state_that_held_later_does_not_replace_it() -> None:
    course, _ = at_trial(loss=0.05, fma=500.0)
    assert (course.held_at, course.held_fma) == (104, 500.0)
    course.advance(course.ends_at, 600.0, never)
    course.advance(course.ends_at, 600.0, lambda thorough: 0.04)
    assert (course.held_at, course.held_fma) == (104, 500.0)
    assert course.good_at == 176


def test_a_missed_trial_is_said_without_a_forecast() -> None:
    course, _ = at_trial(loss=0.25)
    said = course.in_doubt() or ""
    assert "step 104 of 400" in said
    assert "500 FMA" in said
    assert "0.25, above the named 0.1" in said
    assert "the target is not missed yet: the last anneal follows" in said
    assert "in reach" not in said
    course.observe([0.3] * 4)
    course.advance(108, 500.0, never)
    assert course.in_doubt() is None  # once
    assert at_trial(loss=0.05)[0].in_doubt() is None


@pytest.mark.parametrize(
    ("unit", "shown"), [("ms", "22.62 ms"), ("bytes", "23 bytes"), ("FMA per token", "23 FMA per")]
)
def test_messages_name_the_unit_of_the_price(unit: str, shown: str) -> None:
    course, answer = at_trial(loss=0.9, fma=22.62, unit=unit)
    assert f"the model of {shown}" in (course.in_doubt() or "")
    assert f"a trial anneal of {shown}" in answer.reason
    assert answer.reason.endswith("is cut more carefully, as is normal after such a trial")


def test_a_state_that_was_lost_comes_back_and_the_run_ends_within_reach() -> None:
    """A model that presses fast: trials fail, and what is returned to was kept."""
    run = simulated(named=0.06, shrinks=0.93, heat=1.0).run()
    went_back = [(step, a.return_to) for step, a in run.answers if a.return_to is not None]
    assert went_back
    for step, to in went_back:
        assert to in run.kept
        assert run.steps[step]["fma"] == run.kept[to]
    provisional = [row["pressed_loss"] for row in run.course.trials]
    assert provisional[1] < provisional[0]


def test_after_a_good_and_a_failed_trial_the_next_is_between() -> None:
    course, _ = at_trial(loss=0.02)
    looser = course.provisional
    course.observe([looser] * 60)
    course.advance(course.ends_at, 300.0, never)
    answer = course.advance(course.ends_at, 300.0, lambda thorough: 0.4)
    assert answer.return_to == 104
    assert course.provisional == pytest.approx(
        min(
            math.sqrt(course.trials[0]["pressed_loss"] * looser),
            max(0.7 * looser, (looser + 0.1) / 2),
        )
    )
    assert course.fall == course.good_fall  # of the state that it returned to


def test_a_near_miss_learns_on_at_its_size() -> None:
    """Not sent back, with a tighter press, while another trial follows."""
    course, answer = at_trial(loss=0.168)
    assert answer == Answer()
    assert course.good_at == 40
    assert course.provisional < 0.3


def test_a_spike_before_a_trial_says_nothing_about_its_fall() -> None:
    """Else the next press would be as loose as the spike was high."""
    calm, _ = at_trial(loss=0.02, before=0.29)
    spike, _ = at_trial(loss=0.02, before=6.0)
    assert calm.loss_before == pytest.approx(0.29)
    assert spike.loss_before == pytest.approx(2 * 0.29)
    assert spike.provisional <= 2 * calm.provisional
