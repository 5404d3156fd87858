"""Phases and learning rates, value by value."""

import math
from itertools import pairwise

import pytest

from gaugelasso.training.schedule import Schedule


def plan(**changes: int) -> Schedule:
    lengths = {"steps": 100, "warmup": 10, "cooldown": 20, "saturation": 8} | changes
    return Schedule(**lengths, lr=1.0, lr_min=0.1)


def test_phases_follow_one_another() -> None:
    phases = [plan().phase(step, None) for step in range(100)]
    assert phases == ["warmup"] * 10 + ["compression"] * 70 + ["cooldown"] * 20


def test_the_rate_rises_stays_and_falls() -> None:
    rates = [plan().rate(step, None) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:80] == [1.0] * 70
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 20)) / 2 for k in range(20)]
    assert rates[80:] == pytest.approx(cosine)
    assert all(before > after for before, after in pairwise(rates[80:]))
    assert rates[90] == pytest.approx(0.55)


def test_the_rate_ends_at_its_minimum() -> None:
    assert plan().rate(100, None) == pytest.approx(0.1)
    assert plan().rate(48, frozen_at=40) == pytest.approx(0.1)


def test_a_met_target_starts_the_anneal_at_once() -> None:
    schedule = plan()
    assert schedule.end(None) == 100
    assert schedule.end(40) == 48
    assert [schedule.phase(step, 40) for step in (39, 40, 47)] == [
        "compression", "cooldown", "cooldown",
    ]  # fmt: skip
    assert schedule.rate(39, 40) == 1.0
    assert schedule.rate(40, 40) == 1.0
    assert schedule.rate(44, 40) == pytest.approx(0.55)


def test_without_saturation_a_met_target_is_annealed_for_the_cooldown() -> None:
    assert plan(saturation=0).end(40) == 60
    assert plan(saturation=0, cooldown=0).end(40) == 40


def test_without_warmup_the_first_step_has_the_full_rate() -> None:
    schedule = plan(warmup=0)
    assert schedule.phase(0, None) == "compression"
    assert schedule.rate(0, None) == 1.0


def test_without_cooldown_pressure_lasts_to_the_end() -> None:
    schedule = plan(cooldown=0)
    assert schedule.phase(99, None) == "compression"
    assert schedule.rate(99, None) == 1.0


def test_a_run_of_warmup_and_cooldown_alone_never_presses() -> None:
    schedule = plan(steps=30)
    assert "compression" not in [schedule.phase(step, None) for step in range(30)]
