"""Steps without a loss in a loop of your own."""

import math

import pytest

from gaugelasso.compress.events import Event
from gaugelasso.compress.result import TargetMissedWarning
from gaugelasso.errors import UserError
from tests.compress.own_loops import Loop


def returns(loop: Loop) -> list[Event]:
    return [event for event in loop.compressor.history if event.returned_to is not None]


def test_a_few_nan_losses_are_skipped() -> None:
    loop = Loop(named=1.0, steps=120, spoiled={3: math.nan, 40: math.nan, 41: math.nan})
    assert loop.run().held
    assert int(loop.compressor.skipped) == 3
    assert loop.pilot.returns == len(returns(loop))
    assert all(event.step not in (4, 42) for event in returns(loop))


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


def test_nan_losses_to_the_end_end_the_run_on_a_state_that_held() -> None:
    """The state is returned to some times, and then it is the last."""
    loop = Loop(named=1.0, steps=400, spoiled=dict.fromkeys(range(200, 400), math.nan))
    result = loop.run()
    course = loop.pilot.course
    assert result.held
    assert result.steps == 280  # three returns, of twenty skipped steps each, and the end
    assert (result.loss, result.fma) == (course.held_loss, course.held_fma)
    assert [event.step for event in returns(loop)][-4:] == [220, 240, 260, 280]
    assert loop.compressor.done


def test_a_loop_that_goes_on_after_that_is_told_to_finish() -> None:
    loop = Loop(named=1.0, steps=400, spoiled=dict.fromkeys(range(200, 400), math.nan))
    with pytest.raises(UserError, match=r"the run has ended at step 280 .*; call finish\(\)"):
        loop.run_to(400)
    assert loop.compressor.finish().held


def test_nan_losses_without_a_state_that_held_are_an_error() -> None:
    loop = Loop(named=1e-3, steps=400, spoiled=dict.fromkeys(range(200, 400), math.nan))
    with pytest.raises(UserError, match=r"for 20 steps in a row at step 280; lower the learning"):
        loop.run()
    assert loop.pilot.failed_returns == 3


def test_a_state_that_is_not_finite_is_not_kept() -> None:
    loop = Loop(steps=100)
    loop.step()
    states = loop.pilot.memory
    states.keep(1, wanted=[1])
    loop.compressor.optimizer.store.weight[0] = math.nan
    states.keep(2, wanted=[1, 2])
    assert list(states.kept) == [1]


def test_held_out_losses_that_are_nan_hold_nothing() -> None:
    loop = Loop(named=1e9, steps=40)
    loop.step()
    loop.pilot._evaluate = lambda: math.nan
    said = "ends at a loss of nan after 40 steps. No loss on the way was finite; check the held-out"
    with pytest.warns(TargetMissedWarning, match=said):
        assert not loop.run().held
