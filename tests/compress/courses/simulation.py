"""A simulated model on a course: numbers in, numbers out."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gaugelasso.compress.courses.course import Answer, Course
from gaugelasso.compress.courses.window import Measured

LR = 0.01
FULL = 1000.0


@dataclass
class Simulated:
    """A model that learns, whose loss rises with the rate and as its work falls.

    Pressure removes a share of the work at each step whose loss is within the pressed one. With
    `metric`, a function of the loss, each measurement has both.
    """

    course: Course
    floor: float = 0.02
    heat: float = 5.0
    shrinks: float = 0.98
    gap: float = 0.0
    metric: Callable[[float], float] | None = None
    at: int = 0
    fma: float = FULL
    kept: dict[int, float] = field(default_factory=dict)
    # One row for each step, and one for each call of `advance` with an answer or a new stage.
    steps: list[dict[str, Any]] = field(default_factory=list)
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    stages: list[tuple[str, int, int]] = field(default_factory=list)
    measured: list[tuple[int, bool]] = field(default_factory=list)

    def loss(self, step: int, rate: float) -> float:
        learning = 2 * math.exp(-step / (self.course.steps / 20))
        return learning + self.floor * FULL / self.fma * (1 + self.heat * rate / LR)

    def step(self) -> None:
        course, at = self.course, self.at
        rate, pressed, phase = course.rate(at), course.pressed_loss(at), course.phase(at)
        loss = self.loss(at, rate)
        self.steps.append({"rate": rate, "pressed": pressed, "phase": phase, "fma": self.fma})
        if pressed is not None and loss <= pressed:
            self.fma *= self.shrinks
        course.observe([loss])
        self.at += 1
        if not course.due(self.at):
            return
        before = course.stage, course.began_at, self.at

        def measure(thorough: bool) -> float:
            self.measured.append((self.at, thorough))
            loss = self.loss(at, rate) + self.gap
            if self.metric is not None:
                course.seen(Measured(loss, self.metric(loss)))
            return loss

        answer = course.advance(self.at, self.fma, measure)
        if answer.keep:
            self.kept[self.at] = self.fma
        if answer.return_to is not None:
            self.fma = self.kept[answer.return_to]
        if answer != Answer():
            self.answers.append((self.at, answer))
        if before[:2] != (course.stage, course.began_at):
            self.stages.append(before)

    def run(self, until: int | None = None) -> "Simulated":
        while self.at < (until or self.course.steps):
            self.step()
        if until is None:
            self.stages.append((self.course.stage, self.course.began_at, self.at))
        return self


def simulated(named: float = 0.1, steps: int = 400, **settings: Any) -> Simulated:
    return Simulated(Course(steps, LR, named=named), **settings)


def at_trial(
    loss: float, before: float = 0.3, fma: float = 500.0, **fields: Any
) -> tuple[Course, Answer]:
    """A course of 400 steps after its first trial, which ends at this loss."""
    known = {"first_loss": 2.0, "good_at": 40, "good_fma": 900.0} | fields
    course = Course(400, LR, **({"named": 0.1} | known))
    course.observe([before] * 60)
    course.advance(80, fma, never)
    assert course.stage == "trial"
    return course, course.advance(course.ends_at, fma, lambda thorough: loss)


def never(thorough: bool) -> float:
    raise AssertionError("nothing is to be measured here")
