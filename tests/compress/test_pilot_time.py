"""A loop of your own that has a time budget in place of a number of steps."""

import math

import pytest

from gaugelasso.compress import pilot as pilot_module
from tests.compress.own_loops import Loop


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only the test advances."""
    now = [100.0]
    monkeypatch.setattr(pilot_module.time, "monotonic", lambda: now[0])
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
    assert len(loop.pilot.course.trials) >= 2
    loop.step()  # a loop that looks at the clock less often
    result = loop.compressor.finish()
    assert (result.held, result.steps) == (True, steps + 1)


def test_a_time_budget_that_is_cut_short_is_said(clock: list[float]) -> None:
    loop = Loop(named=1e9, seconds=30.0)
    loop.step()
    clock[0] += 3.0
    with pytest.warns(UserWarning, match=r"after 1000 of 10000 ticks"):
        loop.compressor.finish()


def test_seconds_are_those_of_a_clock() -> None:
    loop = Loop(named=1e9, seconds=0.2)
    assert loop.run().steps > 3
