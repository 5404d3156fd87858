"""A run in a loop of your own: the compressor sets rate and pressure, and answers at the end."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso.compress import pilot as pilot_module
from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.compress.defaults import default_interval, default_lr, default_options, matrix_sizes
from gaugelasso.compress.events import Event
from gaugelasso.compress.pilot import Pilot
from gaugelasso.compress.recording import open_recorder, register_opener
from gaugelasso.compress.result import Result, TargetMissed, TargetMissedWarning
from gaugelasso.errors import UserError
from tests.examples import example

Perceptron = example("your_model").Perceptron
FAST = CompressorOptions(lr=0.02, interval=5)


class Loop:
    """The example's perceptron and its task. `losses` replaces the loss of some steps."""

    def __init__(self, named: float = 0.5, spoiled: dict[int, float] | None = None, **given: Any):
        self.generator = torch.Generator().manual_seed(0)
        self.teacher = Perceptron(8, 4, 3).requires_grad_(False)
        for parameter in self.teacher.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=self.generator))
        torch.manual_seed(0)
        self.model = Perceptron(8, 32, 3)
        self.held_out = torch.randn(512, 8, generator=self.generator)
        self.spoiled, self.calls = spoiled or {}, 0
        if given.get("evaluate") is True:
            given["evaluate"] = self.evaluate
        self.compressor = Compressor(self.model, named, **({"options": FAST} | given))
        assert (self.compressor.pilot is None) == ("steps" not in given and "seconds" not in given)

    @property
    def pilot(self) -> Pilot:
        assert self.compressor.pilot is not None
        return self.compressor.pilot

    def evaluate(self) -> Tensor:
        return F.mse_loss(self.model(self.held_out), self.teacher(self.held_out))

    def batch(self) -> Tensor:
        return torch.randn(64, 8, generator=self.generator)

    def loss(self, x: Tensor) -> Tensor:
        self.calls += 1
        factor = self.spoiled.get(self.compressor.steps, 1.0)
        return factor * F.mse_loss(self.model(x), self.teacher(x))

    def step(self) -> Event | None:
        x = self.batch()
        return self.compressor.step(lambda: self.loss(x))

    def run_to(self, steps: int) -> None:
        while self.compressor.steps < steps:
            self.step()

    def run(self) -> Result:
        while not self.compressor.done:
            self.step()
        return self.compressor.finish()


@pytest.fixture(scope="module")
def ended() -> tuple[Loop, Result]:
    """A run of 200 steps that ends within the loss it names."""
    loop = Loop(steps=200, evaluate=True)
    return loop, loop.run()


# --- what a run leads to -------------------------------------------------------------


def test_a_run_ends_smaller_and_within_the_named_loss(ended: tuple[Loop, Result]) -> None:
    loop, result = ended
    compressor = loop.compressor
    assert result.held
    assert result.loss <= result.loss_target == 0.5
    assert result.loss == pytest.approx(float(loop.evaluate().detach()))
    assert result.measured_on == "held-out data"
    assert result.steps == compressor.steps == 200
    assert (result.fma_initial, result.fma) == (compressor.fma_initial, compressor.fma)
    assert (result.parameters_initial, result.parameters) == (384, compressor.parameters)
    assert result.widths == compressor.widths == {"hidden": len(loop.model.down)}
    assert result.fma < 0.8 * result.fma_initial == 0.8 * 352
    assert result.compression == pytest.approx(352 / result.fma)
    assert [row["step"] for row in result.trials] == [52, 88, 124]


def test_a_result_names_its_figures(ended: tuple[Loop, Result]) -> None:
    _, result = ended
    text = str(result)
    for figure in (
        f"352 -> {result.fma:,.0f} FMA per token ({result.compression:.1f}x)",
        f"384 -> {result.parameters:,} parameters",
        f"loss {result.loss:.4g} on held-out data, named 0.5: held",
    ):
        assert figure in text


def test_finish_gives_the_same_result_again(ended: tuple[Loop, Result]) -> None:
    loop, result = ended
    assert loop.compressor.done
    assert loop.compressor.finish() is result


def test_a_trial_that_failed_went_back(ended: tuple[Loop, Result]) -> None:
    """The state was kept in memory; the return is on record, and the steps go on."""
    loop, result = ended
    returns = [each for each in loop.compressor.history if each.returned_to is not None]
    assert returns
    sizes = {row["step"]: row["fma"] for row in result.trials}
    for event in returns:
        assert event.step in sizes
        assert (event.fma_before, event.fma) == (sizes[event.step], sizes[event.returned_to])
        assert event.fma_before < event.fma
    assert set(loop.pilot.kept) == {loop.pilot.course.good_at, loop.pilot.course.held_at} - {None}


def test_a_tensor_does_as_well_as_a_function() -> None:
    """With a probe of the same batch, to the last bit."""
    whole = Loop(steps=60)
    losses: list[list[float]] = [[], []]
    for _ in range(60):
        x = whole.batch()
        losses[0].append(float(whole.loss(x).detach()))
        whole.compressor.step(lambda x=x: whole.loss(x))  # type: ignore[misc]
    other = Loop(steps=60)
    for _ in range(60):
        x = other.batch()
        loss = other.loss(x)
        losses[1].append(float(loss.detach()))
        loss.backward()
        other.compressor.probe = lambda x=x: float(other.loss(x))  # type: ignore[misc]
        other.compressor.step(loss)
    assert losses[0] == losses[1]
    assert all(p.grad is None for p in other.model.parameters())


def test_the_function_is_the_probe_of_an_event() -> None:
    loop = Loop(named=20.0, steps=100, options=CompressorOptions(lr=0.02, interval=10))
    calls = []
    for _ in range(20):
        before = loop.calls
        event = loop.step()
        calls.append(loop.calls - before)
        assert (event is None) == (loop.calls - before == 1)
        if event is not None:
            assert event.loss_before is not None
            assert math.isfinite(event.loss_before)
    assert max(calls) > 1


def test_rate_pressure_and_pressed_loss_are_those_of_the_course() -> None:
    loop = Loop(steps=100)
    course, scalars = loop.pilot.course, loop.compressor.scalars
    seen = set()
    for step in range(100):
        rate, pressed, phase = course.rate(step), course.pressed_loss(step), course.phase(step)
        loop.step()
        seen.add(phase)
        if (step + 1) % 10 and not loop.pilot.kept.get(step + 1):
            assert float(scalars.lr) == pytest.approx(rate)
        assert float(scalars.pressure) == (0.0 if pressed is None else 1.0)
        if pressed is not None:
            assert float(scalars.loss_target) == pytest.approx(pressed)
    assert seen == {"warmup", "compression", "trial", "cooldown"}
    assert loop.compressor.done


def test_without_evaluate_the_last_training_batches_decide() -> None:
    loop = Loop(named=1.0, steps=120)
    result = loop.run()
    assert result.held
    assert result.measured_on == "the last training batches"
    assert result.loss == pytest.approx(loop.pilot.course.loss)
    assert "on the last training batches" in str(result)


def test_options_follow_from_the_model_and_the_steps() -> None:
    loop = Loop(steps=2_000, options=None)
    options = loop.compressor.options
    assert options == default_options(loop.model, 2_000)
    assert (options.lr, options.interval) == (3e-3, 20)
    assert loop.pilot.course.lr == 3e-3
    assert Loop(options=None).compressor.options == CompressorOptions()


def test_the_default_rate_falls_with_the_width() -> None:
    assert default_lr([128 * 128]) == pytest.approx(0.2 / 128)
    assert default_lr([256 * 256, 256 * 256, 4]) == pytest.approx(0.2 / 256)
    assert default_lr([1]) == default_lr([]) == 3e-3
    assert default_lr([10**9]) == 1e-4
    assert [default_interval(steps) for steps in (20, 2_000, 10**6)] == [10, 20, 100]
    assert matrix_sizes(Perceptron(8, 32, 3)) == [8 * 32, 32 * 3]


# --- a loss that is not reached ------------------------------------------------------


def test_a_loss_out_of_reach_is_said() -> None:
    loop = Loop(named=1e-3, steps=60, evaluate=True)
    with pytest.warns(TargetMissedWarning) as caught:
        result = loop.run()
    assert not result.held
    assert "MISSED" in str(result)
    (warning,) = caught
    said = str(warning.message)
    assert "loss_target = 0.001 was missed: the full model ends at a loss of" in said
    assert f"{result.loss:.4g} after 60 steps" in said
    best = min([result.loss, *(row["selection_loss"] for row in result.trials)])
    assert f"The best loss on the way was {best:.4g}" in said
    assert warning.filename == __file__  # of the loop, not of the package


def test_a_trial_that_missed_is_said_early(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(named=1e-3, steps=60, evaluate=True)
    loop.run_to(16)
    (trial,) = loop.pilot.course.trials
    (said,) = [record.message for record in caplog.records]
    assert f"has a loss of {trial['selection_loss']:.4g}, above the named 0.001" in said


def test_a_missed_result_names_the_size_it_ended_at() -> None:
    row = {"step": 5, "selection_loss": None}
    result = Result(
        held=False, loss=0.3, loss_target=0.1, measured_on="held-out data", steps=50,
        fma_initial=352.0, fma=99.0, parameters_initial=384, parameters=108, widths={},
        trials=[row, {**row, "selection_loss": 0.2}],
    )  # fmt: skip
    said = result.missed_message()
    assert "the model of 99 FMA per token" in said
    assert "The best loss on the way was 0.2" in said
    assert issubclass(TargetMissed, UserError)
    assert "trials" not in repr(result)


def test_a_final_model_that_misses_gives_way_to_one_that_held() -> None:
    """All hold but the end: the result is that of the smallest state before it."""
    loop: Any = Loop(named=0.5, steps=100, evaluate=lambda: loop.answer())
    end = []

    def answer() -> float:
        if loop.compressor.steps < 100:
            return 0.4
        end.append(loop.compressor.fma)
        return 0.7 if len(end) < 2 else 0.45  # the end, the state that held

    loop.answer = answer
    result = loop.run()
    assert result.held
    assert (result.loss, result.fma) == (0.45, loop.pilot.course.held_fma)
    assert result.fma <= min(row["fma"] for row in result.trials)
    assert loop.compressor.history[-1].returned_to == loop.pilot.course.held_at
    assert len(loop.model.down) == result.widths["hidden"]


def test_without_evaluate_the_loss_is_that_of_the_state_that_held() -> None:
    spoiled = dict.fromkeys(range(150, 160), 50.0)  # the last batches are of another task
    loop = Loop(named=1.0, steps=160, spoiled=spoiled)
    result = loop.run()
    course = loop.pilot.course
    assert result.held
    assert (result.loss, result.fma) == (course.held_loss, course.held_fma)


# --- mistakes ------------------------------------------------------------------------


def test_a_step_after_the_last_is_refused() -> None:
    loop = Loop(named=9.0, steps=20)
    for _ in range(20):
        loop.step()
    calls = loop.calls
    with pytest.raises(UserError, match=r"step 21 of 20: all steps are taken; call finish\(\)"):
        loop.step()
    assert loop.calls == calls
    loop.compressor.finish()
    with pytest.raises(UserError, match=r"step after finish\(\)"):
        loop.step()


def test_finish_before_the_end_is_said() -> None:
    loop = Loop(named=1e9, steps=40)
    for _ in range(7):
        loop.step()
    assert not loop.compressor.done
    with pytest.warns(UserWarning, match=r"finish\(\) after 7 of 40 steps: the anneal is not over"):
        assert loop.compressor.finish().held


def test_finish_without_steps_is_refused() -> None:
    loop = Loop()
    assert not loop.compressor.done
    with pytest.raises(UserError, match="give Compressor the number of its steps"):
        loop.compressor.finish()


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"steps": 100, "seconds": 3.0}, UserError, "either steps or seconds, not both"),
        ({"steps": 19}, UserError, "steps = 19: must be a whole number of at least 20"),
        ({"steps": 100.0}, UserError, r"steps = 100\.0: must be a whole number"),
        ({"steps": True}, UserError, "steps = True: must be a whole number"),
        ({"seconds": 0.0}, UserError, r"seconds = 0.0: must be more than 0"),
        ({"seconds": math.inf}, UserError, "seconds = inf: must be a finite number"),
        ({"seconds": "3"}, TypeError, "seconds = '3': must be a number"),
        ({"evaluate": lambda: 1.0}, UserError, "evaluate needs the length of the run: give steps"),
        ({"record": "runs/mine"}, UserError, "record needs the length of the run: give steps"),
        ({"steps": 100, "evaluate": 0.5}, TypeError, "evaluate = 0.5: must be a function"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_a_mistake_is_named(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Compressor(Perceptron(8, 4, 3), 0.5, **given)


@pytest.mark.parametrize(
    "loss", [lambda: 0.5, lambda: None, lambda: torch.tensor(0.5)], ids=["float", "none", "plain"]
)
def test_a_function_without_a_loss_is_refused(loss: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=r"function given to step returned .*; it must return the"):
        Loop(steps=20).compressor.step(loss)


@pytest.mark.parametrize("loss", [math.nan, math.inf, "low"])
def test_a_loss_to_press_towards_must_be_a_number(loss: Any) -> None:
    compressor = Loop().compressor
    with pytest.raises((UserError, TypeError), match="loss_target = "):
        compressor.set_loss_target_(loss)


def test_a_loss_to_press_towards_bounds_what_an_event_may_cost() -> None:
    compressor = Compressor(Perceptron(8, 4, 3), 0.5, CompressorOptions(drop_tolerance=0.1))
    assert compressor._allowance == pytest.approx(0.05)
    compressor.set_loss_target_(-2.0)
    assert float(compressor.scalars.loss_target) == -2.0
    assert compressor._allowance == pytest.approx(0.2)
    compressor.set_loss_target_(2.0, allowance=0.01)
    assert compressor._allowance == 0.01
    compressor.set_loss_target_(2.0, allowance=5.0)
    assert compressor._allowance == pytest.approx(0.2)


# --- evaluate ------------------------------------------------------------------------


def test_evaluate_sees_a_model_in_eval_mode_without_gradients() -> None:
    modes = []

    def evaluate() -> float:
        modes.append((loop.model.training, torch.is_grad_enabled()))
        return 0.4

    loop = Loop(steps=40, evaluate=evaluate)
    for _ in range(40):
        loop.step()
        assert loop.model.training
    assert loop.compressor.finish().loss == 0.4
    assert len(modes) > 3
    assert set(modes) == {(False, False)}
    assert loop.model.training


def test_the_model_trains_on_after_an_evaluation_that_raised() -> None:
    def evaluate() -> float:
        raise FileNotFoundError("held-out data")

    loop = Loop(steps=20, evaluate=evaluate)
    with pytest.raises(FileNotFoundError):
        loop.pilot.selection_loss()
    assert loop.model.training


# --- a time budget -------------------------------------------------------------------


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


# --- steps without a loss ------------------------------------------------------------


def test_a_few_nan_losses_are_skipped() -> None:
    loop = Loop(named=1.0, steps=120, spoiled={3: math.nan, 40: math.nan, 41: math.nan})
    assert loop.run().held
    assert int(loop.compressor.skipped) == 3
    assert loop.pilot.failures == 0


def test_many_nan_losses_return_to_a_kept_state() -> None:
    loop = Loop(named=1.0, steps=200, spoiled=dict.fromkeys(range(60, 82), math.nan))
    result = loop.run()
    assert result.held
    (event,) = [each for each in loop.compressor.history if each.step == 80]
    assert event.returned_to in (52, 40, 42, 44, 46, 48)
    assert int(loop.compressor.skipped) == 22


def test_nan_losses_before_any_kept_state_are_an_error() -> None:
    loop = Loop(steps=400, spoiled=dict.fromkeys(range(400), math.nan))
    with pytest.raises(UserError, match=r"NaN or infinite for 20 steps in a row at step 20; lower"):
        loop.run()


def test_nan_losses_to_the_end_are_an_error() -> None:
    """The state is returned to some times, and then no more."""
    loop = Loop(named=1.0, steps=400, spoiled=dict.fromkeys(range(120, 400), math.nan))
    with pytest.raises(UserError, match="NaN or infinite for 20 steps in a row"):
        loop.run()
    assert loop.pilot.failures == 4
    assert sum(event.returned_to is not None for event in loop.compressor.history) >= 3


def test_held_out_losses_that_are_nan_hold_nothing() -> None:
    loop = Loop(named=1e9, steps=40, evaluate=lambda: math.nan)
    with pytest.warns(TargetMissedWarning, match="ends at a loss of nan"):
        assert not loop.run().held


# --- a work target -------------------------------------------------------------------


def test_a_work_target_that_is_met_starts_the_anneal() -> None:
    loop = Loop(named=50.0, steps=200, fma_target=200.0)
    while not loop.compressor.work_target_met:
        loop.step()
    while loop.pilot.course.stage != "anneal":
        loop.step()
    assert loop.pilot.course.began_at <= loop.compressor.steps <= 60
    result = loop.run()
    assert result.held
    assert 190 < result.fma <= 200


# --- the recorder --------------------------------------------------------------------


class Notes:
    def __init__(self) -> None:
        self.notes: list[Any] = []

    def prepare(self, model: Any) -> None:
        self.model = model

    def begin(self, pilot: Pilot) -> None:
        self.pilot = pilot

    def event(self, event: Event) -> None:
        self.notes.append(event)

    def kept(self, name: int) -> None:
        self.notes.append(name)

    def advanced(self, losses: list[float]) -> None:
        self.notes.append(losses)

    def finished(self, result: Result) -> None:
        self.notes.append(result)


def test_a_recorder_hears_of_everything_in_order() -> None:
    recorder = Notes()
    loop = Loop(steps=200, evaluate=True, record=recorder)
    assert recorder.pilot is loop.pilot
    assert recorder.model is loop.model
    result = loop.run()
    notes = recorder.notes
    assert notes[-1] is result
    assert [note for note in notes if isinstance(note, Event)] == loop.compressor.history
    losses = [note for note in notes if isinstance(note, list)]
    assert len(losses) == 100  # every second step
    assert sum(map(len, losses)) == 200
    json.dumps(losses)
    # A state is kept once all losses up to it are known: a checkpoint of it has them.
    kept = [(note, index) for index, note in enumerate(notes) if type(note) is int]
    assert {name for name, _ in kept} >= {52, loop.pilot.course.good_at}
    for name, index in kept:
        assert sum(len(note) for note in notes[:index] if isinstance(note, list)) == name


def test_a_folder_is_opened_by_who_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from gaugelasso.compress import recording

    monkeypatch.setattr(recording, "_opener", [])
    opened = []

    def opener(path: Any, resume: bool) -> Notes:
        opened.append((path, resume))
        return Notes()

    register_opener(opener)
    assert isinstance(open_recorder("runs/mine", True), Notes)
    own = Notes()
    assert open_recorder(own, False) is own
    assert open_recorder(None, False) is None
    assert opened == [("runs/mine", True)]
