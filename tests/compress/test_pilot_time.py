"""A loop of your own that has a time budget in place of a number of steps."""

import math

import pytest

from gaugelasso.compress import time_budget
from gaugelasso.compress.compressor import CompressorOptions
from tests.compress.own_loops import Loop


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only the test advances."""
    now = [100.0]
    monkeypatch.setattr(time_budget.time, "monotonic", lambda: now[0])
    return now


def test_a_time_budget_ends(clock: list[float]) -> None:
    loop = Loop(named=1.0, seconds=30.0, evaluate=True)
    clock[0] += 50.0  # time before the first step does not count
    assert not loop.compressor.done
    phases = []
    while not loop.compressor.done:
        phases.append(loop.pilot.course.phase(loop.pilot.now))
        loop.step()
        clock[0] += 0.21
    steps = loop.compressor.steps
    assert steps == math.ceil(30 / 0.21)
    assert list(dict.fromkeys(phases)) == ["warmup", "compression", "trial", "cooldown"]
    assert phases.count("cooldown") >= 0.37 * steps
    assert len(loop.pilot.course.trials) == 3
    loop.step()  # a loop that looks at the clock less often
    result = loop.compressor.finish()
    assert (result.held, result.steps) == (True, steps + 1)


@pytest.mark.parametrize("seconds", [0.121, 0.21, 0.35, 0.9, 1.5])
def test_a_time_budget_has_its_three_trials(clock: list[float], seconds: float) -> None:
    """However many ticks a step jumps over: the last run has twenty steps."""
    loop = Loop(named=1.0, seconds=30.0, evaluate=True)
    began = []
    while not loop.compressor.done:
        loop.step()
        clock[0] += seconds
        if loop.pilot.course.stage == "anneal":
            began.append(loop.pilot.now)
    trials = [row["step"] for row in loop.pilot.course.trials]
    assert len(trials) == 3
    late = 10_000 * seconds / 30 + 100  # a step, and the grain of the course
    for step, planned in zip(trials, (2_600, 4_400, 6_200), strict=True):
        assert planned <= step <= planned + late
    assert began[0] <= 6_200 + 2 * late


def test_after_a_long_pause_the_plan_moves(clock: list[float]) -> None:
    """A trial of no length would say nothing, so there is one less."""
    loop = Loop(named=1.0, seconds=30.0, evaluate=True)
    while not loop.compressor.done:
        paused = not loop.pilot.course.trials and loop.pilot.course.stage == "trial"
        loop.step()
        clock[0] += 5.0 if paused else 0.1
    loop.compressor.finish()
    assert len(loop.pilot.course.trials) == 2


@pytest.mark.parametrize(
    ("seconds", "interval"), [(0.003, 100), (0.011, 27), (0.1, 10), (2.5, 10)], ids=str
)
def test_the_interval_follows_from_the_time_of_a_step(
    clock: list[float], seconds: float, interval: int
) -> None:
    loop = Loop(named=1e-3, seconds=30.0, options=CompressorOptions(lr=0.02))
    clock_of_first = 1.0  # the first step compiles
    before = float(loop.compressor.scalars._norm_rate)
    while loop.pilot.now <= loop.pilot.course.warmup:
        loop.step()
        clock[0] += clock_of_first if loop.compressor.steps == 1 else seconds
    loop.step()
    assert loop.compressor.options.interval == interval
    # A hundred steps would follow norms by the same share as one interval.
    rate = loop.compressor.scalars._norm_rate
    assert (1 - rate) ** interval == pytest.approx((1 - before) ** 100)
    while loop.compressor.steps < 30:  # and stays, whatever later steps take
        loop.step()
        clock[0] += 0.5
    assert loop.compressor.options.interval == interval


def test_an_interval_that_is_given_stays(clock: list[float]) -> None:
    loop = Loop(named=1.0, seconds=30.0, options=CompressorOptions(interval=33))
    for _ in range(40):
        loop.step()
        clock[0] += 0.1
    assert loop.compressor.options.interval == 33


def test_a_time_budget_that_is_cut_short_is_said(clock: list[float]) -> None:
    loop = Loop(named=1e9, seconds=30.0)
    loop.step()
    clock[0] += 3.0
    with pytest.warns(UserWarning, match=r"after 10% of the time that `seconds` names"):
        loop.compressor.finish()


def test_seconds_are_those_of_a_clock() -> None:
    loop = Loop(named=1e9, seconds=0.2)
    assert loop.run().steps > 3
