"""The stages of a course and its learning rate."""

import math

import pytest

from gaugelasso.compress.courses.course import Course
from gaugelasso.compress.courses.stages import LEAST_RATE, RESTART
from tests.compress.courses.simulation import FULL, LR, Simulated, simulated


@pytest.mark.parametrize("steps", [20, 57, 199, 400, 1234])
def test_stages_follow_each_other_and_fill_all_steps(steps: int) -> None:
    run = simulated(steps=steps).run()
    names, begins, ends = zip(*run.stages, strict=True)
    last = names.index("anneal")
    assert names[0] == "start"
    assert set(names[1:last:2]) == {"trial"}
    assert set(names[2:last:2]) <= {"press"}
    assert ends[last:] == (steps,)
    assert begins == (0, *ends[:-1])
    assert 0.3 * steps <= steps - begins[last] <= 0.6 * steps


def test_a_run_has_three_trials() -> None:
    run = simulated().run()
    assert [row["step"] for row in run.course.trials] == [104, 176, 248]
    assert {row["phase"] for row in run.steps} == {"warmup", "compression", "trial", "cooldown"}


def test_warm_up_is_linear_and_has_no_pressure() -> None:
    run = simulated().run()
    warm = [row for row in run.steps if row["phase"] == "warmup"]
    assert len(warm) == 20
    assert [row["rate"] for row in warm] == pytest.approx([LR * (i + 1) / 20 for i in range(20)])
    assert {row["pressed"] for row in warm} == {None}
    assert run.steps[20]["rate"] == LR
    assert run.steps[20]["pressed"] is not None


def test_the_rate_is_full_under_pressure_and_falls_in_trials_and_in_the_anneal() -> None:
    run = simulated().run()
    for stage, begin, end in run.stages:
        rates = [row["rate"] for row in run.steps[max(begin, 20) : end]]
        if stage in ("start", "press"):
            assert set(rates) == {LR}
            continue
        assert rates == sorted(rates, reverse=True)
        low = LEAST_RATE * LR
        high = LR if stage == "trial" else low + RESTART * (LR - low)
        assert rates[0] == pytest.approx(high)
        assert low < rates[-1] < low + 0.01 * LR


def test_there_is_no_pressure_in_trials() -> None:
    run = simulated().run()
    for stage, begin, end in run.stages:
        pressed = [row["pressed"] is not None for row in run.steps[max(begin, 20) : end]]
        assert not any(pressed) if stage == "trial" else pressed[0]


def test_given_lengths_and_rates_stay() -> None:
    course = Course(400, LR, named=0.1, warmup=7, anneal=300, least_rate=0.004)
    run = Simulated(course).run()
    assert sum(row["phase"] == "warmup" for row in run.steps) == 7
    assert len(course.trials) == 1  # no room for another before so long an anneal
    assert run.steps[-1]["rate"] == pytest.approx(0.004, rel=1e-3)


def test_selection_data_are_read_in_full_where_they_decide() -> None:
    run = simulated().run()
    trials, landing = {104, 176, 248}, 400 - 40
    for step, thorough in run.measured:
        assert thorough == (step in trials or step >= landing)
    partial = [step for step, thorough in run.measured if not thorough]
    assert partial == list(range(248 + 16, landing, 16))


@pytest.mark.parametrize("ticks", [7, 33, 450])
def test_a_clock_that_jumps_passes_all_stages(ticks: int) -> None:
    """As with a time budget: the course sees only some of its ticks."""
    course, seen, measured, at = Course(10_000, LR, named=0.1), set(), [], 0
    while at < 10_000:
        course.observe([2 * math.exp(-at / 500) + 0.05])
        seen.add(course.phase(at))
        at = min(at + ticks, 10_000)
        if course.due(at):
            course.advance(at, FULL, lambda thorough: measured.append(thorough) or 0.05)
    assert seen == {"warmup", "compression", "trial", "cooldown"}
    assert course.advanced_at == 10_000
    assert measured.count(False) > 3  # also before the landing
