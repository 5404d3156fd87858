"""A run in a loop of your own: the compressor sets rate and pressure, and answers at the end."""

import math
from typing import Any

import pytest
import torch

from gaugelasso.compress.compressor import Compressor, CompressorOptions
from gaugelasso.compress.courses.pretrained import PretrainedCourse
from gaugelasso.compress.defaults import default_interval, default_lr, matrix_sizes
from gaugelasso.compress.options import RunOptions
from gaugelasso.compress.result import Result, TargetMissed, TargetMissedWarning
from gaugelasso.errors import UserError
from tests.compress import own_loops
from tests.compress.own_loops import Loop, Perceptron


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
    course = loop.pilot.course
    assert set(loop.pilot.memory.kept) == {course.good_at, course.held_at} - {None}


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
        if (step + 1) % 10 and not loop.pilot.memory.kept.get(step + 1):
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
    assert loop.compressor.options == RunOptions(lr=3e-3, interval=20)
    assert loop.pilot.course.lr == 3e-3
    assert Loop(options=None).compressor.options == RunOptions(lr=1e-3, interval=100)


def test_options_that_are_not_given_still_follow() -> None:
    """One option of the user's own does not bring back the defaults of the others."""
    counted = Loop(steps=2_000, options=CompressorOptions(accounting="paper"))
    assert counted.compressor.options == RunOptions(lr=3e-3, interval=20, accounting="paper")
    rate = Loop(steps=2_000, options=CompressorOptions(lr=0.01)).compressor.options
    assert (rate.lr, rate.interval) == (0.01, 20)
    events = Loop(steps=2_000, options=CompressorOptions(interval=7)).compressor
    assert (events.options.lr, events.options.interval) == (3e-3, 7)
    alone = Loop(options=CompressorOptions(accounting="paper")).compressor.options
    assert alone == RunOptions(accounting="paper")


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"interval": 0}, {"interval": 2.5}], ids=str)
def test_options_that_are_given_are_checked(wrong: dict[str, Any]) -> None:
    for kind in (CompressorOptions, RunOptions):
        with pytest.raises(UserError, match=f"compress.{next(iter(wrong))} = "):
            kind(**wrong)
    with pytest.raises(UserError, match=r"compress\.lr = None"):
        RunOptions(lr=None)  # type: ignore[arg-type]


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
    assert warning.filename == own_loops.__file__  # of the loop, not of the package


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


def test_without_evaluate_a_run_can_end_on_its_start() -> None:
    spoiled = dict.fromkeys(range(2, 60), 1e4)  # all but the first batches are of another task
    options = CompressorOptions(lr=1e-4, removal="harm", interval=10)
    loop = Loop(named=50.0, steps=60, spoiled=spoiled, options=options)
    result, course = loop.run(), loop.pilot.course
    assert isinstance(course, PretrainedCourse)
    assert course.held_at == course.start_at == 1
    assert result.held
    assert (result.loss, result.fma) == (course.start_loss, course.start_fma)
    assert result.loss < 50


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


def test_a_compiled_model_is_compressed_as_the_model_itself() -> None:
    """The compressor has the model, and the loop calls what torch.compile returned."""
    plain, compiled = Loop(named=9.0, steps=40), Loop(named=9.0, steps=40)
    compiled.model = torch.compile(compiled.model, backend="eager")  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"OptimizedModule is what torch\.compile returned"):
        Compressor(compiled.model, 9.0, steps=40)
    for loop in (plain, compiled):
        for _ in range(40):
            loop.step()
    ends = [loop.compressor.finish() for loop in (plain, compiled)]
    assert ends[0].fma < ends[0].fma_initial
    assert (ends[1].fma, ends[1].loss) == (ends[0].fma, ends[0].loss)
