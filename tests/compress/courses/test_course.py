"""The course of a run, over a simulated model: numbers in, numbers out."""

import json
import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from gaugelasso.compress.courses.course import RELEASED, TIGHTEST, Answer, Course, Measure
from gaugelasso.compress.courses.stages import LEAST_RATE, RESTART
from gaugelasso.compress.courses.window import LEAST_ROOM, MOST_ROOM, LossWindow, Measured
from gaugelasso.errors import UserError

LR = 0.01
FULL = 1000.0


@dataclass
class Simulated:
    """A model that learns, whose loss rises with the rate and as its work falls.

    Pressure removes a share of the work at each step whose loss is within the pressed one.
    """

    course: Course
    floor: float = 0.02
    heat: float = 5.0
    shrinks: float = 0.98
    gap: float = 0.0
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
            return self.loss(at, rate) + self.gap

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


# --- the stages ----------------------------------------------------------------------


@pytest.mark.parametrize("steps", [20, 57, 199, 400, 1234])
def test_stages_follow_each_other_and_fill_all_steps(steps: int) -> None:
    run = simulated(steps=steps).run()
    names, begins, ends = zip(*run.stages, strict=True)
    assert names[0] == "start"
    assert names[-1] == "anneal"
    assert set(names[1:-1:2]) == {"trial"}
    assert set(names[2:-1:2]) <= {"press"}
    assert begins == (0, *ends[:-1])
    assert ends[-1] == steps
    anneal = steps - begins[-1]
    assert 0.3 * steps <= anneal <= 0.6 * steps


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


# --- the pressed loss ----------------------------------------------------------------


def test_nothing_is_pressed_before_a_loss_is_known() -> None:
    course = Course(400, LR, named=0.1)
    assert course.pressed_loss(50) is None
    course.observe([math.nan, math.inf])
    assert course.pressed_loss(50) is None
    course.observe([math.nan, 2.1, 1.0])
    assert course.pressed_loss(50) == pytest.approx(0.1 + 0.1 * 2.0)


@pytest.mark.parametrize(
    ("named", "first", "wanted"),
    [(0.001, 10.0, 0.1), (1.0, 5.0, 1.4), (2.0, 1.5, 2.0), (-1.0, 3.0, -0.6)],
    ids=["geometric mean", "a tenth of the way", "below from the start", "negative"],
)
def test_the_first_provisional_loss(named: float, first: float, wanted: float) -> None:
    course = Course(400, LR, named=named)
    course.observe([first])
    assert course.pressed_loss(50) == pytest.approx(wanted)


def test_a_trial_with_room_loosens_the_provisional_loss() -> None:
    course, answer = at_trial(loss=0.02)
    assert answer == Answer(keep=True)
    assert course.stage == "press"
    assert course.trials[0]["pressed_loss"] == pytest.approx(0.29)
    assert 0.4 < course.pressed_loss(120) <= 0.1 + 0.2 * 1.9


def test_a_narrow_trial_keeps_the_provisional_loss_close() -> None:
    roomy, _ = at_trial(loss=0.03)
    narrow, _ = at_trial(loss=0.099)
    assert 0.1 < narrow.provisional < 0.45 < roomy.provisional


def test_the_provisional_loss_grows_at_most_fourfold() -> None:
    course, _ = at_trial(loss=1e-6, before=2e-4, named=1e-4, first_loss=9.0)
    assert course.provisional == pytest.approx(4 * 2e-4)


def test_the_pressed_loss_of_the_anneal_falls_to_the_aim() -> None:
    run = simulated(shrinks=1.0).run()
    (_, begin, _) = run.stages[-1]
    pressed = [row["pressed"] for row in run.steps[begin:]]
    assert None not in pressed
    assert pressed[0] > 1.2 * run.course.named
    assert pressed[0] > pressed[75] > pressed[-1]
    assert pressed[-1] == pytest.approx(run.course.aim, rel=1e-3)


def test_the_anneal_presses_lower_where_selection_data_are_worse() -> None:
    def last_pressed(gap: float) -> float:
        run = simulated(shrinks=1.0, gap=gap).run()
        return run.course.pressed_loss(399) or math.nan

    level = last_pressed(0.0)
    assert last_pressed(0.03) == pytest.approx(level - 0.03, abs=0.006)
    assert last_pressed(-0.03) == pytest.approx(level, rel=1e-3)  # luck is no reason to press less


def test_the_pressed_loss_has_a_floor() -> None:
    course = Course(400, LR, named=0.1, stage="anneal", ends_at=400, first_loss=2.0, gap=5.0)
    assert course.pressed_loss(399) == pytest.approx(0.03)


def test_one_event_may_cost_a_tenth_or_a_hundredth_of_the_way() -> None:
    course = Course(400, LR, named=0.1, first_loss=10.0)
    assert course.allowance(0.1) == pytest.approx(0.01)
    assert course.allowance(5.0) == pytest.approx(0.05)
    assert course.allowance(12.0) == 0.0


# --- trials --------------------------------------------------------------------------


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
    assert late.advance(248, 500.0, lambda thorough: 0.145).return_to == 40
    _, answer = at_trial(loss=0.145)
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


def test_a_missed_trial_is_said_with_what_is_in_reach() -> None:
    course, _ = at_trial(loss=0.25)
    said = course.in_doubt() or ""
    assert "step 104 of 400" in said
    assert "500 FMA" in said
    assert "0.25, above the named 0.1" in said
    assert "about 0.2303 is in reach" in said
    course.observe([0.3] * 4)
    course.advance(108, 500.0, never)
    assert course.in_doubt() is None  # once
    assert at_trial(loss=0.05)[0].in_doubt() is None


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


# --- the end -------------------------------------------------------------------------


def landed(measure: Measure) -> list[bool]:
    """Whether each step of a landing presses towards the aim, not far below it."""
    where: dict[str, Any] = {"stage": "anneal", "began_at": 248, "advanced_at": 360, "ends_at": 400}
    course, pressed = Course(400, LR, named=0.1, first_loss=2.0, **where), []
    for step in range(360, 400):
        course.observe([0.09])
        towards = (course.pressed_loss(step) or 0.0) + max(course.gap or 0.0, 0.0)
        pressed.append(towards != pytest.approx(RELEASED * course.aim))
        if course.due(step + 1):
            course.advance(step + 1, 200.0, measure)
    return pressed


def test_the_landing_releases_pressure_while_the_loss_is_above_the_aim() -> None:
    assert landed(lambda thorough: 0.05) == [True] * 40
    assert landed(lambda thorough: 0.0995) == [True] * 4 + [False] * 36  # the aim is 1% below
    assert landed(lambda thorough: math.nan) == [True] * 4 + [False] * 36
    losses = iter([0.05] * 2 + [0.1] * 3 + [0.05] * 4)
    pressed = landed(lambda thorough: next(losses))
    assert pressed == [True] * 12 + [False] * 12 + [True] * 16


def test_states_that_hold_on_the_way_down_are_kept() -> None:
    """Of each size one; the run ends on it if the pressure goes too far."""
    where: dict[str, Any] = {"stage": "anneal", "began_at": 248, "advanced_at": 248, "ends_at": 400}
    course, kept, measured = Course(400, LR, named=0.1, first_loss=2.0, **where), [], []

    def measure(thorough: bool) -> float:
        measured.append(thorough)
        return 0.05

    for step in range(248, 400):
        course.observe([0.09])
        if course.due(step + 1):
            fma = 300.0 - 10 * (step // 50)
            answer = course.advance(
                step + 1, fma, lambda thorough: measured.append(thorough) or 0.05
            )
            kept += [step + 1] if answer.keep else []
    assert kept == [264, 300 + 12, 350 + 10]  # the first measurement after each cut
    assert (course.held_at, course.held_fma, course.held_loss) == (360, 230.0, 0.05)
    # A partial measurement is repeated in full where it would keep a state.
    assert measured.count(True) == 2 + 10


def test_the_aim_stays_below_by_the_noise_of_selection_data() -> None:
    course = Course(400, LR, named=0.1)
    assert course.aim == pytest.approx(0.1 * (1 - LEAST_ROOM))
    course.seen(Measured(0.2, 0.0, 0.002))
    assert course.aim == pytest.approx(0.1 - 3 * 0.002)
    course.seen(Measured(0.2, 0.0))  # of unknown error
    assert course.aim == pytest.approx(0.1 - 3 * 0.002)
    course.seen(Measured(0.2, 0.0, 0.5))
    assert course.aim == pytest.approx(0.1 * (1 - MOST_ROOM))


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
    """Neither kept nor sent back, with a tighter press, while another trial follows."""
    course, answer = at_trial(loss=0.154)
    assert answer == Answer()
    assert course.good_at == 40
    assert course.provisional < 0.3


def test_a_work_target_that_is_met_starts_the_anneal() -> None:
    run = simulated().run(133)
    run.course.end_compression(133)
    assert run.course.stage == "anneal"
    run.run()
    assert (run.course.began_at, run.course.ends_at) == (133, 400)
    assert {row["phase"] for row in run.steps[133:]} == {"cooldown"}
    assert run.steps[133]["rate"] == pytest.approx(LR * (LEAST_RATE + RESTART * (1 - LEAST_RATE)))
    assert run.steps[-1]["rate"] == pytest.approx(LEAST_RATE * LR, rel=1e-2)
    run.course.end_compression(390)
    assert run.course.began_at == 133  # it began once


@pytest.mark.parametrize("named", [-2.0, 0.0])
def test_a_named_loss_that_is_not_positive(named: float) -> None:
    course = Course(400, LR, named=named)
    fma = FULL
    for step in range(400):
        course.observe([3 + (named - 3.5) * min(step / 60, 1)])
        assert math.isfinite(course.pressed_loss(step) or 0.0)
        if course.due(step + 1):
            course.advance(step + 1, fma, lambda thorough: named - 0.4)
            fma *= 0.999
    assert course.held_at == 396  # the last state that was measured on the way, and the smallest
    assert [row["selection_loss"] for row in course.trials] == [named - 0.4] * 3
    # Selection data are 0.1 above training data.
    assert course.pressed_loss(399) == pytest.approx(course.aim - 0.1)
    assert json.loads(json.dumps(course.to_dict(), allow_nan=False)) == course.to_dict()


def test_a_negative_loss_above_the_named_one_does_not_hold() -> None:
    course, answer = at_trial(loss=-1.0, before=-0.5, named=-2.0)
    assert course.held_at is None
    assert answer.return_to == 40
    assert "-1, above the named -2" in (course.in_doubt() or "")


# --- a checkpoint of it --------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 19, 71, 80, 103, 104, 105, 170, 177, 248, 300, 385])
def test_a_course_goes_on_from_a_checkpoint(at: int) -> None:
    """Of a run with all kinds of trials."""
    settings: dict[str, Any] = {"named": 0.06, "shrinks": 0.93, "heat": 1.0}
    whole = simulated(**settings).run()
    assert any(answer.return_to for _, answer in whole.answers)
    first = simulated(**settings).run(at)
    text = json.dumps(first.course.to_dict(), allow_nan=False)
    second = simulated(**settings, at=at, fma=first.fma, kept=first.kept)
    second.course.load_(json.loads(text))
    assert second.course == first.course
    second.run()
    assert second.steps == whole.steps[at:]
    assert second.course == whole.course


def test_what_is_kept_does_not_change_with_the_course() -> None:
    run = simulated().run(110)
    kept = run.course.to_dict()
    text = json.dumps(kept)
    run.run()
    assert json.dumps(kept) == text
    again = Course(400, LR, named=0.1)
    again.load_(kept)
    again.observe([1.0])
    again.trials.clear()
    assert json.dumps(kept) == text


DAMAGED: list[tuple[str, Any]] = [
    ("stage", "flight"),
    ("stage", None),
    ("began_at", None),
    ("ends_at", "80"),
    ("ends_at", 10**9),
    ("advanced_at", -1),
    ("advanced_at", 2.5),
    ("provisional", None),
    ("provisional", math.nan),
    ("fall", math.inf),
    ("released", 1),
    ("released", None),
    ("recent", 0.5),
    ("recent", ["a"]),
    ("recent", [math.nan]),
    ("recent", [None]),
    ("trials", {}),
    ("trials", [1]),
    ("trials", [{}]),
    ("trials", [{"step": 104, "selection_loss": "low"}]),
    ("good_at", True),
    ("good_at", 1.5),
    ("good_fma", "inf"),
    ("held_at", -4),
    ("first_loss", "2"),
]


@pytest.mark.parametrize(("name", "value"), DAMAGED, ids=lambda value: str(value))
def test_a_damaged_value_is_refused_and_changes_nothing(name: str, value: Any) -> None:
    kept = simulated().run(110).course.to_dict()
    course = Course(400, LR, named=0.1)
    with pytest.raises(UserError, match=f"course: {name} = "):
        course.load_({**kept, name: value})
    assert course == Course(400, LR, named=0.1)


@pytest.mark.parametrize("values", [{}, [], None, "course"], ids=str)
def test_what_is_no_table_of_values_is_refused(values: Any) -> None:
    with pytest.raises(UserError, match="course"):
        Course(400, LR, named=0.1).load_(values)


# --- the window of losses ------------------------------------------------------------


def room(losses: list[float], named: float = 0.1) -> float:
    """The share of the named loss by which the aim is below it."""
    window = LossWindow(named=named)
    window.observe(losses)
    return 1 - window.aim / named


def noisy(noise: float, fall: float = 0.0) -> list[float]:
    draw = random.Random(0)
    return [math.exp(draw.gauss(0, noise) - fall * i) for i in range(200)]


def test_the_aim_is_below_the_named_loss_by_the_noise() -> None:
    rooms = [room(noisy(noise)) for noise in (0.0, 0.01, 0.1, 0.2, 3.0)]
    assert rooms == sorted(rooms)
    assert rooms[0] == rooms[1] == pytest.approx(LEAST_ROOM)
    assert rooms[2] == pytest.approx(0.052, rel=0.2)  # three standard errors of 33 losses
    assert rooms[3] == pytest.approx(2 * rooms[2], rel=0.01)
    assert rooms[4] == pytest.approx(MOST_ROOM)
    assert room([]) == room([0.5]) == pytest.approx(LEAST_ROOM)


def test_a_falling_loss_is_no_noise() -> None:
    assert room(noisy(0.0, fall=0.05)) == pytest.approx(LEAST_ROOM)
    assert room(noisy(0.1, fall=0.05)) == pytest.approx(room(noisy(0.1)), rel=1e-6)


def test_the_aim_is_below_a_negative_loss_too() -> None:
    window = LossWindow(named=-2.0)
    window.observe([-1.0, -1.5])
    assert window.aim == pytest.approx(-2.02)


def test_the_loss_is_a_mean_of_the_last_finite_ones() -> None:
    window = LossWindow(named=0.1)
    assert window.loss == math.inf
    window.observe([math.nan, 9.0, *[5.0] * 100])
    window.observe([math.inf, *[1.0] * 32, math.nan])
    assert window.first_loss == 9.0
    assert window.loss == pytest.approx((32 * 1.0 + 5.0) / 33)
    assert len(window.recent) == 60
