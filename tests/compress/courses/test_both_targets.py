"""A loss and a metric that are named together: numbers in, numbers out."""

import json
import math
import random
from typing import Any

import pytest

from gaugelasso.compress.courses.choice import course_of
from gaugelasso.compress.courses.course import TIGHTER, Course
from gaugelasso.compress.courses.metric import MetricCourse
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.compress.courses.window import ERRORS, MOST_ROOM, Measured
from tests.compress.courses.simulation import LR, Simulated

LOSS = 0.2


def both(*pairs: tuple[float, float], loss: float = LOSS, **fields: Any) -> MetricTarget:
    """A metric of 0.9 and a loss, after these measurements."""
    target = MetricTarget(0.9, loss=loss, **fields)
    for pair in pairs:
        target.see(*pair)
    return target


# --- the estimate --------------------------------------------------------------------


def test_before_a_measurement_the_named_loss_is_the_estimate() -> None:
    assert both().estimate() == LOSS
    assert both((math.nan, 0.95)).estimate() == LOSS
    assert both(loss=-1.0).estimate() == -1.0


def test_the_named_loss_bounds_the_estimate() -> None:
    assert both((2.0, 0.1)).estimate() == LOSS  # half of 2 is above it
    assert both((0.15, 0.95)).estimate() == LOSS  # and so is the double of 0.15
    assert both((0.3, 0.5), (0.19, 0.95)).estimate() == LOSS


def test_below_the_named_loss_the_metric_decides() -> None:
    assert both((0.16, 0.5), (0.04, 0.95)).estimate() == pytest.approx(0.08)
    assert both((0.1, 0.5)).estimate() == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("loss", "metric", "met"),
    [(0.2, 0.9, True), (0.21, 0.9, False), (0.2, 0.89, False), (0.3, 0.5, False)],
)
def test_both_are_met_or_not(loss: float, metric: float, met: bool) -> None:
    target = both((loss, metric))
    assert target.both_met(loss, metric) is met
    assert (loss <= (target.estimate() or 0.0)) is met
    assert not target.both_met(math.nan, 0.95)
    assert not target.both_met(0.1, math.nan)


def test_a_metric_that_is_met_above_the_named_loss_leaves_it_as_it_is() -> None:
    assert both((0.3, 0.95)).estimate() == LOSS


def test_without_a_named_loss_the_metric_alone_decides() -> None:
    alone = both(loss=math.inf)
    assert alone.estimate() is None
    assert alone.both_met(math.nan, 0.95)  # as before: a loss is not asked for
    assert alone.both_met(1e9, 0.95)


@pytest.mark.parametrize("seed", range(20))
def test_the_loss_is_within_the_estimate_exactly_if_both_are_met(seed: int) -> None:
    """Of any measurements in any order, also where loss and metric contradict each other."""
    source = random.Random(seed)
    lower, centre = source.random() < 0.5, source.choice([0.0, 1.0])
    bound = centre + source.uniform(-1, 1)
    target = MetricTarget(0.5, lower, loss=bound)
    for _ in range(200):
        loss = source.choice([bound, centre + source.gauss(0, 1), 10 ** source.uniform(-6, 3)])
        metric = source.choice([0.5, source.random(), math.nan])
        target.see(loss, metric)
        estimate = target.estimate()
        assert estimate is not None
        assert estimate <= bound
        reached = metric <= 0.5 if lower else metric >= 0.5
        assert (loss <= estimate) is (reached and loss <= bound)


# --- in a course ---------------------------------------------------------------------


def course(loss: float = LOSS, **fields: Any) -> MetricCourse:
    return MetricCourse(400, LR, goal=MetricTarget(0.9, loss=loss), **fields)


def test_a_course_presses_towards_the_named_loss_from_the_end_of_the_warm_up() -> None:
    one, loss_alone = course(), Course(400, LR, named=LOSS)
    for each in (one, loss_alone):
        each.observe([2.0] * 30)
    assert one.pressed_loss(19) is None
    assert one.pressed_loss(20) == loss_alone.pressed_loss(20) == LOSS + 0.1 * (2.0 - LOSS)
    assert one.aim == loss_alone.aim
    metric_alone = course(math.inf)
    metric_alone.observe([2.0] * 30)
    assert metric_alone.pressed_loss(20) is None


def test_the_choice_of_a_course_joins_both() -> None:
    chosen = course_of(LOSS, MetricTarget(0.9), 0.0, 400, LR)
    assert isinstance(chosen, MetricCourse)
    assert (chosen.goal.value, chosen.goal.loss, chosen.named) == (0.9, LOSS, LOSS)
    given = MetricTarget(0.9, loss=0.1)
    assert course_of(None, given, 0.0, 400, LR).named == 0.1
    assert course_of(LOSS, given, 0.0, 400, LR).named == 0.1  # both are bounds
    assert course_of(None, MetricTarget(0.9), 0.0, 400, LR).named == 0.0


def test_a_state_has_the_named_loss_for_sure_below_its_noise() -> None:
    """As where the loss is named alone: test data decide on it, and differ by that noise."""
    one, loss_alone = course(), Course(400, LR, named=LOSS)
    for each in (one, loss_alone):
        each.seen(Measured(0.15, 0.95, error=0.005))
    assert one.sure == loss_alone.sure == pytest.approx(LOSS - ERRORS * 0.005)
    one.seen(Measured(0.15, 0.95, error=1.0))
    assert one.sure == pytest.approx((1 - MOST_ROOM) * LOSS)
    one.seen(Measured(0.15, 0.5, error=0.001))  # the metric needs less
    assert one.sure == one.named == pytest.approx(0.075)


def after_trial(loss: float, metric: float) -> MetricCourse:
    """A course whose first trial has these on selection data."""
    one = course(first_loss=2.0)
    one.observe([0.5] * 60)
    one.seen(Measured(0.5, 0.5))
    one.advance(80, 100.0, lambda thorough: 0.5)

    def measure(thorough: bool) -> float:
        one.seen(Measured(loss, metric))
        return loss

    one.advance(one.ends_at, 100.0, measure)
    return one


@pytest.mark.parametrize(
    ("loss", "metric", "doubt"),
    [
        (0.15, 0.95, None),
        (0.15, 0.8, "a metric of 0.8, short of the named 0.9; its loss is 0.15, and about 0.075"),
        (0.3, 0.95, "0.95, which meets the named 0.9; its loss is 0.3, above the named 0.2, and"),
        (0.3, 0.8, "0.8, short of the named 0.9; its loss is 0.3, above the named 0.2, and about"),
    ],
)
def test_a_trial_is_held_if_both_are(loss: float, metric: float, doubt: str | None) -> None:
    one = after_trial(loss, metric)
    assert (one.held_at == one.trials[-1]["step"]) is (doubt is None)
    assert one.stays(loss, 100.0) is (doubt is None)
    said = one.in_doubt()
    assert said is None if doubt is None else doubt in (said or "")


def test_a_checkpoint_brings_back_the_estimate_within_the_named_loss() -> None:
    for measured in ([], [Measured(1.6, 0.4)], [Measured(0.1, 0.4), Measured(0.02, 0.95)]):
        one, other = course(), course()
        for each in measured:
            one.seen(each)
        other.load_(json.loads(json.dumps(one.to_dict())))
        assert other == one
        assert other.named == one.named
    assert other.named == pytest.approx(math.sqrt(0.1 * 0.02))


# --- of a simulated model ------------------------------------------------------------


def simulated(loss: float, need: float) -> Simulated:
    """A run of a model that meets the metric up to the loss `need`."""
    one = MetricCourse(400, LR, goal=MetricTarget(0.9, loss=loss))
    return Simulated(one, floor=0.005, metric=lambda at: 1 - 0.1 * at / need).run()


@pytest.mark.parametrize(("loss", "need"), [(0.1, 0.08), (0.08, 0.1), (0.1, 0.3)])
def test_a_run_ends_within_the_tighter_of_both(loss: float, need: float) -> None:
    run = simulated(loss, need)
    final, tighter = run.loss(399, run.course.rate(399)), min(loss, need)
    assert 0.9 * tighter < final <= tighter
    assert 0.9 * tighter < run.course.named <= loss
    assert run.course.held_at is not None
    assert run.course.held_loss <= tighter
    assert [row["pressed"] is None for row in run.steps[:25]] == [True] * 20 + [False] * 5


def test_the_named_loss_starts_the_compression_sooner_than_a_metric_alone() -> None:
    first = {
        loss: next(at for at, row in enumerate(simulated(loss, 0.08).steps) if row["pressed"])
        for loss in (0.1, math.inf)
    }
    assert first == {0.1: 20, math.inf: 32}


def test_a_trial_that_missed_the_metric_is_no_reason_to_press_more_loosely() -> None:
    met, missed = after_trial(0.05, 0.95), after_trial(0.05, 0.8)
    assert met.provisional > met.trials[-1]["pressed_loss"]
    assert missed.provisional == pytest.approx(TIGHTER * missed.trials[-1]["pressed_loss"])
    assert missed.good_at == missed.trials[-1]["step"]  # it goes on from there
