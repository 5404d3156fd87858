"""The course of a model that has the target loss from the start: it ends no worse."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from gaugelasso.compress.course_driver import CourseDriver
from gaugelasso.compress.courses.choice import course_of
from gaugelasso.compress.courses.pretrained import PretrainedCourse
from gaugelasso.compress.courses.window import Measured
from gaugelasso.errors import UserError
from tests.compress.courses.simulation import FULL, LR, Simulated, never


@dataclass
class Pretrained(Simulated):
    """Its loss rises with the rate and as its work falls, from 3.0; it has nothing to learn."""

    def loss(self, step: int, rate: float) -> float:
        return 3.0 * (1 + self.heat * rate / LR + 0.1 * (FULL / self.fma - 1))


def pretrained(named: float = 3.09, **settings: Any) -> Pretrained:
    course = course_of(named, None, 0.0, 400, LR, by_harm=True)
    assert isinstance(course, PretrainedCourse)
    return Pretrained(course, **settings)


def course_in(model: Pretrained) -> PretrainedCourse:
    assert isinstance(model.course, PretrainedCourse)
    return model.course


def test_a_gentle_rate_stays_and_the_start_is_kept() -> None:
    model = pretrained(heat=0.005).run()
    course = course_in(model)
    assert (course.slower, course.start_at, course.start_fma) == (1.0, 1, FULL)
    assert course.start_at in model.kept
    assert model.fma < 0.9 * FULL
    assert list(course.ends())[-1] == course.start_at


def test_a_rate_that_takes_the_loss_away_is_halved_after_the_warmup() -> None:
    model = pretrained(heat=0.2)
    model.run(until=60)
    course = course_in(model)
    halved = [(at, answer) for at, answer in model.answers if answer.return_to is not None]
    # 20%, 10%: more than three times the 3% that are allowed. 5% is left to the trials.
    assert [at for at, _ in halved] == [20, 40]
    assert course.slower == 0.25
    assert all(answer.return_to == course.start_at for _, answer in halved)
    assert "halved to 0.005" in halved[0][1].reason
    assert course.rate(60) == pytest.approx(LR / 4)
    assert model.fma == FULL


def test_a_trial_of_the_whole_model_that_misses_halves_the_rate_and_not_the_press() -> None:
    course = PretrainedCourse(
        400, LR, named=3.09, by_harm=True, first_loss=3.0, start_at=4, start_fma=FULL,
        start_loss=3.0, good_at=4, good_fma=FULL, looked_at=24,
    )  # fmt: skip
    course.observe([3.3] * 60)
    course.advance(80, 0.98 * FULL, never)
    assert course.stage == "trial"
    answer = course.advance(course.ends_at, 0.98 * FULL, lambda thorough: 3.2)
    assert answer.return_to == course.good_at == 4
    assert (course.slower, course.too_loose, course.stage) == (0.5, None, "press")
    assert course.trials[-1]["selection_loss"] == 3.2
    # With a good part of the work gone, the press is to blame.
    course.observe([3.3] * 60)
    course.advance(course.ends_at, 0.8 * FULL, never)
    course.advance(course.ends_at, 0.8 * FULL, lambda thorough: 3.3)
    assert course.slower == 0.5
    assert course.too_loose is not None


def test_a_model_that_does_not_have_the_loss_follows_the_usual_course() -> None:
    model = pretrained(named=2.9, heat=0.2).run(until=100)
    course = course_in(model)
    assert (course.start_at, course.slower) == (None, 1.0)


def test_losses_below_zero_are_not_compared_by_shares() -> None:
    course = PretrainedCourse(
        400, LR, named=-1.0, by_harm=True, start_at=4, start_fma=FULL, start_loss=-1.1, good_at=4,
        good_fma=FULL, advanced_at=20, first_loss=-1.1,
    )  # fmt: skip
    course.observe([0.5] * 60)
    assert course.advance(24, FULL, lambda thorough: 0.5).return_to is None


def test_a_checkpoint_keeps_what_was_halved() -> None:
    model = pretrained(heat=0.2)
    model.run(until=60)
    other = pretrained(heat=0.2).course
    other.load_(model.course.to_dict())
    assert other.to_dict() == model.course.to_dict()
    assert other.rate(100) == model.course.rate(100)
    old = model.course.to_dict()
    for name in ("start_at", "start_fma", "start_loss", "slower", "looked_at"):
        del old[name]  # as older checkpoints are
    other.load_(old)
    assert course_in(Pretrained(other)).slower == 1.0


def test_the_start_is_measured_once_however_slow_the_clock() -> None:
    """With a time budget many steps can have the tick 0."""
    course = course_in(pretrained())
    measured: list[bool] = []

    def measure(thorough: bool) -> float:
        measured.append(thorough)
        return 3.0

    for _ in range(5):
        if course.due(0):
            course.advance(0, FULL, measure)
    assert measured == [True]


def test_a_damaged_share_of_the_rate_is_refused() -> None:
    kept = pretrained().course.to_dict()
    for wrong in (0.0, -1.0, 2.0):
        with pytest.raises(UserError, match="slower"):
            pretrained().course.load_(kept | {"slower": wrong})


class Kept:
    """States that measure as given; the first ones are the preferred ones."""

    def __init__(self, losses: dict[int, float | None]):
        self.losses, self.compressor = losses, SimpleNamespace(work_target_met=False, fma=1.0)

    def find(self, names: Iterable[int]) -> int | None:
        return next((name for name in names if name in self.losses), None)

    def measured(self, name: int) -> Measured | None:
        loss = self.losses[name]
        return None if loss is None else Measured(loss, math.nan)


@pytest.mark.parametrize(("losses", "end"), [
    ({90: 3.0, 1: 3.0}, 90), ({90: 3.2, 1: 3.0}, 1), ({1: 3.0}, 1), ({90: None, 1: 3.0}, 90),
    ({90: 3.2, 1: 3.2}, None),
])  # fmt: skip
def test_a_run_ends_on_its_start_if_all_else_misses(
    losses: dict[int, float | None], end: int | None
) -> None:
    course = course_in(pretrained())
    course.held_at, course.held_fma, course.held_loss = 90, 500.0, 3.05
    course.start_at, course.start_fma, course.start_loss = 1, FULL, 3.0
    assert course.ends() == {90: 3.05, 1: 3.0}
    driver = CourseDriver(course, Kept(losses), lambda _: Measured(9.0, 0.0), None, 5)  # type: ignore[arg-type]
    assert driver._held_state() == end
    if end is not None:
        course.ended_on(end)
        assert (course.held_at, course.held_loss) == (end, {90: 3.05, 1: 3.0}[end])
        assert course.held_fma == {90: 500.0, 1: FULL}[end]
