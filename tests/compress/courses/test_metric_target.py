"""The loss that a metric needs, from measured pairs: numbers in, numbers out."""

import json
import math
import random
from typing import Any

import pytest

from gaugelasso.compress.courses.metric import MetricCourse
from gaugelasso.compress.courses.metric_target import MOST_PAIRS, MetricTarget
from gaugelasso.compress.courses.window import Measured
from gaugelasso.errors import UserError


def seen(*pairs: tuple[float, float], **fields: Any) -> MetricTarget:
    target = MetricTarget(0.9, **fields)
    for loss, metric in pairs:
        target.see(loss, metric)
    return target


def test_nothing_is_known_before_a_measurement() -> None:
    assert seen().estimate() is None
    assert seen((math.nan, 0.95)).estimate() is None


def test_while_nothing_met_the_metric_half_of_the_least_loss_is_named() -> None:
    assert seen((2.0, 0.1), (0.8, 0.5), (1.0, 0.4)).estimate() == pytest.approx(0.4)
    assert seen((-2.0, 0.1)).estimate() == pytest.approx(-3.0)


def test_while_nothing_missed_it_the_double_of_the_largest_loss_is_named() -> None:
    assert seen((0.1, 0.95), (0.3, 0.92)).estimate() == pytest.approx(0.6)


def test_between_the_largest_that_met_and_the_smallest_that_did_not() -> None:
    assert seen((0.4, 0.8), (0.1, 0.95), (2.0, 0.1), (0.05, 0.99)).estimate() == pytest.approx(0.2)
    assert seen((1.0, 0.8), (-2.0, 0.95)).estimate() == pytest.approx(-0.5)


def test_a_metric_may_be_better_when_lower() -> None:
    target = MetricTarget(0.9, lower_is_better=True)
    target.see(0.4, 0.95)
    target.see(0.1, 0.9)
    assert target.is_met(0.9)
    assert not target.is_met(math.nan)
    assert target.estimate() == pytest.approx(0.2)


def test_the_newest_pair_wins_over_what_contradicts_it() -> None:
    target = seen((0.4, 0.8), (0.1, 0.95), (0.2, 0.92))
    target.see(0.15, 0.85)  # missed below a loss that had met it
    assert target.pairs == [(0.4, False), (0.1, True), (0.15, False)]
    target.see(0.5, 0.93)  # met above all that had missed it
    assert target.pairs == [(0.1, True), (0.5, True)]


@pytest.mark.parametrize("seed", range(5))
def test_with_noise_the_estimate_stays_near_and_agrees_with_the_last_measurement(seed: int) -> None:
    """The metric is 1 - loss: 0.9 is met below a loss of 0.1, give or take the noise."""
    target, source = MetricTarget(0.9), random.Random(seed)
    for number in range(200):
        loss = 2.0 * 0.9**number + 0.1 * source.lognormvariate(0, 0.5)
        metric = 1 - loss * source.lognormvariate(0, 0.1)
        target.see(loss, metric)
        estimate = target.estimate()
        assert estimate is not None
        assert (loss <= estimate) is target.is_met(metric)
    assert estimate == pytest.approx(0.1, rel=0.4)
    assert len(target.pairs) <= MOST_PAIRS


# --- in a course ---------------------------------------------------------------------


def course(**fields: Any) -> MetricCourse:
    return MetricCourse(400, 0.01, goal=MetricTarget(0.9), **fields)


def test_a_course_presses_once_it_has_an_estimate() -> None:
    one = course()
    one.observe([2.0] * 60)
    assert one.pressed_loss(50) is None
    one.seen(Measured(1.6, 0.4))
    assert one.named == pytest.approx(0.8)
    assert one.pressed_loss(50) == pytest.approx(0.8 + 0.1 * 1.2)


def test_before_the_first_trial_there_are_measurements() -> None:
    one, steps = course(), []

    def measure(thorough: bool) -> float:
        steps.append(step)
        one.seen(Measured(1.0, 0.5))
        return 1.0

    for step in range(1, 81):
        one.observe([1.0])
        if one.due(step):
            one.advance(step, 100.0, measure)
    assert one.stage == "trial"
    assert steps == list(range(32, 81, 16))  # after the warm-up of 20 steps


@pytest.mark.parametrize("metric", [0.95, 0.8, math.nan])
def test_a_trial_is_held_if_its_metric_is(metric: float) -> None:
    """A loss of 0.3 was too much before; the metric of the trial decides all the same."""
    one = course(pairs=[(0.25, False), (0.1, True)], first_loss=2.0)
    one.observe([0.5] * 60)
    one.seen(Measured(0.25, 0.5))
    one.advance(80, 100.0, lambda thorough: 0.5)

    def measure(thorough: bool) -> float:
        one.seen(Measured(0.3, metric))
        return 0.3

    one.advance(one.ends_at, 100.0, measure)
    assert (one.held_at == one.trials[-1]["step"]) is (metric == 0.95)
    doubt = one.in_doubt()
    assert (doubt is None) is (metric == 0.95)
    assert doubt is None or "short of the named 0.9; its loss is 0.3" in doubt


def test_a_checkpoint_brings_the_estimate_back() -> None:
    one, other = course(), course()
    one.observe([2.0] * 60)
    one.seen(Measured(1.6, 0.4))
    one.seen(Measured(0.4, 0.91))
    other.load_(json.loads(json.dumps(one.to_dict())))
    assert other == one
    assert other.named == pytest.approx(0.8)


@pytest.mark.parametrize("pairs", [None, "x", [1], [["a", True]], [[1.0, 1]], [[1.0]], ["ab"]])
def test_damaged_pairs_are_refused(pairs: Any) -> None:
    with pytest.raises(UserError, match=r"course: pairs = .* is damaged"):
        course().load_({**course().to_dict(), "pairs": pairs})
