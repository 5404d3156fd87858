"""The course to a work per token, over a simulated model: numbers in, numbers out."""

import json
import math
from dataclasses import dataclass

import pytest

from gaugelasso.compress.courses.choice import course_of
from gaugelasso.compress.courses.course import Answer, Course
from gaugelasso.compress.courses.work import LATEST, REACHED, WAY, WorkCourse
from gaugelasso.errors import UserError

LR, FULL = 0.01, 1000.0


@dataclass
class Simulated:
    """A model that learns, whose loss rises as its work falls; pressure removes work.

    The further the pressed loss is above the loss, the more.
    """

    course: WorkCourse
    speed: float = 0.02
    fma: float = FULL
    at: int = 0
    met_at: int | None = None

    def loss(self) -> float:
        return 2 * math.exp(-self.at / 20) + 0.02 * FULL / self.fma

    def run(self, until: int) -> "Simulated":
        while self.at < until:
            course, loss = self.course, self.loss()
            pressed = course.pressed_loss(self.at)
            if pressed is not None and pressed > loss and self.met_at is None:
                self.fma *= 1 - self.speed * min(math.log(pressed / loss), 1.0)
            course.observe([loss])
            self.at += 1
            if course.due(self.at):
                if self.fma <= course.goal and self.met_at is None:
                    self.met_at = self.at
                    course.end_compression(self.at)
                course.advance(self.at, self.fma, never)
        return self


def never(thorough: bool) -> float:
    raise AssertionError("nothing to measure")


def course(goal: float = 100.0, steps: int = 400) -> WorkCourse:
    return WorkCourse(steps, LR, goal=goal)


def test_the_work_is_reached_by_its_share_of_the_steps_and_the_rest_is_an_anneal() -> None:
    run = Simulated(course()).run(400)
    assert run.met_at is not None
    assert 0.4 * 400 < run.met_at <= (REACHED + 0.05) * 400
    assert run.course.stage == "anneal"
    assert (run.course.began_at, run.course.ends_at) == (run.met_at, 400)
    assert run.course.rate(399) < 0.06 * LR < run.course.rate(run.met_at)


def test_the_work_follows_its_schedule() -> None:
    run = Simulated(course(goal=50.0)).run(140)
    half_way = 1000 * 0.05 ** ((140 - 80) / (200 - 80))
    assert run.course.scheduled(140) == pytest.approx(half_way)
    assert half_way < run.fma < 1.5 * half_way  # behind, as little may be pressed at first
    assert run.course.scheduled(0) == run.course.scheduled(80) == FULL
    assert run.course.scheduled(200) == pytest.approx(50.0)
    assert run.course.scheduled(210) < 50.0


@pytest.mark.parametrize(
    ("fma", "above"), [(1000.0, 1.0), (320.0, None), (100.0, -1.0)], ids=["late", "near", "early"]
)
def test_the_pressed_loss_follows_the_work(fma: float, above: float | None) -> None:
    one = course()
    one.observe([2.0] + [0.2] * 60)
    one.advance(20, FULL, never)
    one.advance(140, fma, never)
    pressed, most = one.pressed_loss(140), 0.2 + WAY / 2 * 1.8
    assert pressed is not None
    if above is None:
        assert 0.2 * 0.9 < pressed < most
        assert abs(one.behind) < 0.1
    else:
        assert pressed == pytest.approx(0.2 * (most / 0.2) ** above)


def test_work_that_comes_late_raises_the_bound_to_the_first_loss() -> None:
    one = course()
    one.observe([2.0] + [0.2] * 60)
    one.advance(20, FULL, never)
    one.advance(300, FULL, never)
    pressed = [one.pressed_loss(step) for step in (100, 200, 260, 320, 399)]
    assert pressed[0] < pressed[1] == pytest.approx(0.2 + WAY * 1.8)
    assert pressed[1] < pressed[2] < pressed[3] == pressed[4] == pytest.approx(2.0)
    assert one.allowance(2.0) > 0


def test_work_that_is_never_reached_is_annealed_under_pressure() -> None:
    run = Simulated(course(goal=1.0), speed=0.0).run(400)
    assert run.met_at is None
    assert run.course.stage == "anneal"
    assert run.course.began_at == LATEST * 400
    assert run.course.pressed_loss(399) is not None


def test_there_is_no_pressure_before_the_model_has_learned_or_without_losses() -> None:
    one = course()
    assert one.pressed_loss(90) is None
    one.observe([2.0] * 60)
    one.advance(20, FULL, never)
    assert one.pressed_loss(79) is None
    assert one.pressed_loss(80) is not None


@pytest.mark.parametrize(
    ("steps", "warmup", "begins"), [(400, -1, 80), (70_000, -1, 2000), (400, 100, 100)]
)
def test_the_descent_begins_after_the_warm_up_and_some_learning(
    steps: int, warmup: int, begins: int
) -> None:
    assert WorkCourse(steps, LR, warmup=warmup, goal=100.0).descent_at == begins


def test_a_loss_below_zero_can_be_pressed() -> None:
    one = course()
    one.observe([2.0] + [-3.0] * 60)
    one.advance(20, FULL, never)
    one.advance(140, FULL, never)
    assert one.pressed_loss(140) == pytest.approx(-3.0 + WAY / 2 * 5.0)


def test_states_to_return_to_are_kept_ten_times() -> None:
    one, kept = course(), []
    for step in range(1, 401):
        one.observe([1.0])
        if one.due(step) and one.advance(step, FULL, never) == Answer(keep=True):
            kept.append(step)
            assert one.kept_steps() == [step]
    assert kept == list(range(40, 400, 40))


def test_a_checkpoint_brings_the_course_back() -> None:
    run = Simulated(course()).run(150)
    other = course()
    other.load_(json.loads(json.dumps(run.course.to_dict())))
    assert other == run.course
    assert other.pressed_loss(150) == run.course.pressed_loss(150)
    for name, value in {"fma_first": "x", "behind": None, "least_loss": []}.items():
        with pytest.raises(UserError, match=f"course: {name} = .* is damaged"):
            other.load_({**run.course.to_dict(), name: value})


def test_what_is_named_chooses_the_course() -> None:
    assert type(course_of(0.1, None, 0.0, 400, LR)) is Course
    assert type(course_of(0.1, None, 50.0, 400, LR)) is Course
    named = course_of(None, None, 50.0, 400, LR, warmup=7)
    assert isinstance(named, WorkCourse)
    assert (named.goal, named.warmup) == (50.0, 7)
