"""Losses and weights that are no numbers: steps are skipped, and the run goes back."""

import contextlib
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.runs import checkpoint
from gaugelasso.signals import Stopped
from gaugelasso.tasks import Draw, Retrieval
from gaugelasso.training.trainer import TargetMissed
from tests.tiny import QUICK
from tests.tiny_runs import (
    assert_same_run,
    final_tensors,
    finish,
    newest,
    read,
    rows,
    start,
    stop_at,
)
from tests.training.spoilers import SEED, poison, returns, ruin, spoil
from tests.trust.traps import Signals


def test_a_step_without_a_loss_is_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, range(11, 12))
    trainer = start(tmp_path, **QUICK)
    update, weights = trainer.compressor.device_step.update_, []

    def one(loss: Tensor) -> Tensor:
        weights.append(trainer.compressor.optimizer.store.weight.clone())
        mean = update(loss)
        weights.append(trainer.compressor.optimizer.store.weight.clone())
        return mean

    trainer.compressor.device_step.update_ = one  # type: ignore[method-assign]
    trainer.run()
    before, after = weights[2 * 11 : 2 * 11 + 2]
    assert torch.equal(before, after)
    assert not torch.equal(*weights[2 * 12 : 2 * 12 + 2])
    run = trainer.folder.path
    assert read(run / "summary.json")["skipped_steps"] == 1
    assert returns(run) == []
    assert [row["skipped"] for row in rows(run, "metrics.jsonl")] == [0, 0, 1, 1]
    assert all(t.isfinite().all() for t in final_tensors(run).values() if t.is_floating_point())


def test_too_many_in_a_row_and_the_run_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a good step came before anybody looked."""
    poison(monkeypatch, range(21, 26))
    run = finish(tmp_path, train__skip_limit=5)
    assert returns(run) == [(30, 20)]
    run = finish(tmp_path, "patient", train__skip_limit=6)
    assert returns(run) == []
    monkeypatch.undo()
    poison(monkeypatch, range(20, 30))
    run = finish(tmp_path, "worse", train__skip_limit=5)
    assert returns(run) == [(25, 20), (30, 10)]  # in vain: to one that held the target before
    summary = read(run / "summary.json")
    assert summary["returns"] == 2
    assert summary["skipped_steps"] == 10
    assert summary["steps"] == 40


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_a_first_step_may_fail_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    poison(monkeypatch, range(1))
    run = finish(tmp_path, compress__optimizer=optimizer, **QUICK)
    assert read(run / "summary.json")["skipped_steps"] == 1
    assert all(t.isfinite().all() for t in final_tensors(run).values() if t.is_floating_point())


def test_a_run_that_finds_no_way_on_stops_with_its_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, range(22, 400))
    settings = {"train__skip_limit": 5, "train__steps": 100, "train__checkpoint_every": 20}
    with pytest.raises(UserError) as error:
        finish(tmp_path, target__loss=1e-9, **settings)
    run = tmp_path / "run"
    assert [step for step, _ in returns(run)] == [30, 35, 40]
    seed = Draw(SEED, 44).seed
    message = f"loss or gradient is NaN or infinite at step 45 (batch seed {seed}); "
    message += "last good checkpoint: "
    assert message + repr(str(run / "checkpoints" / "step-00000040")) in str(error.value)
    assert not (run / "summary.json").exists()
    assert checkpoint.load_state(run)[0]["steps"] == 40
    assert all(t.isfinite().all() for t in final_tensors(run).values() if t.is_floating_point())


def test_a_run_that_finds_no_way_on_ends_on_a_state_that_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    poison(monkeypatch, range(22, 400))
    settings = {"train__skip_limit": 5, "train__steps": 100, "train__checkpoint_every": 20}
    run = finish(tmp_path, **settings)
    summary = read(run / "summary.json")
    assert (summary["held"], summary["held_step"], summary["steps"]) == (True, 20, 45)
    assert "the run ends here, on a state that held its target" in caplog.text
    assert newest(run).name == "step-00000045"
    start(tmp_path, existing="resume", **settings).run()
    assert read(run / "summary.json")["fma_final"] == summary["fma_final"]


def test_a_run_that_comes_apart_goes_back_to_where_the_target_was_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to the newest checkpoint, which is of a target already lost."""
    changes = {"train__checkpoint_every": 10, "train__log_every": 1, "train__skip_limit": 3}
    trainer = start(tmp_path, train__patience=10, train__steps=60, **changes)
    spoil(trainer, at=28)
    ruin(monkeypatch, trainer, after=31)
    summary = trainer.run()
    assert returns(trainer.folder.path) == [(34, 20)]
    assert summary["held"]


@pytest.mark.parametrize(("at", "bad", "expected"), [
    (21, range(26, 29), [(26, 20), (29, 20)]),
    (38, range(41, 44), [(40, 35), (44, 35)]),
])  # fmt: skip
def test_what_was_left_is_not_taken_up_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    bad: range,
    expected: list[tuple[int, int]],
) -> None:
    """Steps fail right after a return, under pressure or in a second anneal."""
    poison(monkeypatch, bad)
    trainer = start(
        tmp_path, train__patience=5, train__checkpoint_every=5, train__log_every=1,
        train__skip_limit=3,
    )  # fmt: skip
    spoil(trainer, at=at)
    assert trainer.run()["held"]
    assert returns(trainer.folder.path) == expected


@pytest.mark.parametrize(("bad", "steps", "cooldown"), [
    (range(50, 65), 40, 0),  # beyond the steps of a run whose work target is not met
    (range(40, 55), 70, 20),
])  # fmt: skip
def test_a_met_work_target_outlives_failing_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: range, steps: int, cooldown: int
) -> None:
    """However often the anneal goes back: no state from before it is small enough."""
    poison(monkeypatch, bad)
    changes = {"target__fma": 400.0, "train__saturation": 40, "train__skip_limit": 5}
    run = finish(tmp_path, train__steps=steps, train__cooldown=cooldown, **changes)
    summary = read(run / "summary.json")
    assert len(returns(run)) == 3
    assert min(to for _, to in returns(run)) >= summary["frozen_step"] == 30
    assert (summary["held"], summary["steps"]) == (True, 70)
    assert summary["fma_final"] <= 400
    assert read(newest(run) / "structure.json") == summary["structure"]


def test_a_row_that_ends_with_a_failing_step_freezes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There would be no checkpoint of it."""
    poison(monkeypatch, [29])
    changes = {"target__fma": 400.0, "train__saturation": 10, "train__steps": 60}
    run = finish(tmp_path, **changes)
    assert read(run / "summary.json")["frozen_step"] == 35
    assert (run / "checkpoints" / "step-00000035").exists()


def test_a_stop_between_failures_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with a step that was taken is not one more in vain, whoever looks, and when."""
    poison(monkeypatch, [step for first in (27, 37, 47, 57) for step in range(first, first + 3)])
    settings = {"train__skip_limit": 3, "train__log_every": 10, "train__steps": 70}
    whole = finish(tmp_path, "whole", **settings)
    assert returns(whole) == [(30, 20), (40, 30), (50, 40), (60, 50)]
    with Signals(53), pytest.raises(Stopped):
        finish(tmp_path, **settings)
    start(tmp_path, existing="resume", **settings).run()
    assert_same_run(whole, tmp_path / "run")


def test_a_stop_is_not_what_a_checkpoint_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Due at step 20, which fails, it is written at 25, also by a run that was stopped at 22."""
    poison(monkeypatch, [19, 26, 27, 28])
    whole = finish(tmp_path, "whole", train__skip_limit=3)
    assert returns(whole) == [(30, 25)]
    with Signals(21), pytest.raises(Stopped, match="after step 22"):
        finish(tmp_path, train__skip_limit=3)
    start(tmp_path, existing="resume", train__skip_limit=3).run()
    assert_same_run(whole, tmp_path / "run")


def test_where_no_checkpoint_is_small_enough_a_larger_one_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the cooldown, the work target met; not one that a stop has left among failing steps."""
    poison(monkeypatch, range(29, 34))
    changes = {"target__fma": 400.0, "train__skip_limit": 4}
    whole, larger = tmp_path / "whole", pytest.raises(TargetMissed, match=r"target\.fma = 400 was")
    with larger:
        finish(tmp_path, "whole", **changes)
    assert returns(whole) == [(35, 20)]
    with Signals(31), pytest.raises(Stopped):
        finish(tmp_path, **changes)
    with larger:
        start(tmp_path, existing="resume", **changes).run()
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize("every", [1, 5])
def test_without_a_checkpoint_the_stop_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    poison(monkeypatch, range(400))
    with pytest.raises(UserError, match=r"is NaN or infinite at step \d .*no checkpoint yet"):
        finish(tmp_path, train__log_every=every, train__skip_limit=5)


def test_few_failing_steps_are_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of nothing else has no loss and is left out, not given the loss of the one before."""
    poison(monkeypatch, range(2))
    run = finish(tmp_path, train__log_every=1, **QUICK)
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == list(range(3, 19))
    assert read(run / "summary.json")["skipped_steps"] == 2


def test_a_loss_of_minus_infinity_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, seen = Retrieval.loss, []

    def loss(self: Retrieval, outputs: Tensor, targets: Tensor) -> Tensor:
        seen.extend([1] * torch.is_grad_enabled())
        sunk = torch.is_grad_enabled() and len(seen) == 7
        return honest(self, outputs, targets) - (math.inf if sunk else 0)

    monkeypatch.setattr(Retrieval, "loss", loss)
    summary = read(finish(tmp_path, **QUICK) / "summary.json")
    assert summary["skipped_steps"] == 1
    assert summary["target_reached_step"] != 7


def test_a_failing_step_is_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was due then is saved at the next look, behind a step that was taken."""
    poison(monkeypatch, range(19, 20))
    trainer = start(tmp_path)
    stop_at(trainer, 26)
    ring = sorted(path.name for path in trainer.folder.checkpoints.iterdir())
    assert ring == ["step-00000010", "step-00000025"]


def test_a_stop_at_a_failing_step_saves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it says: also where a checkpoint is due, which would have waited."""
    poison(monkeypatch, range(9, 10))
    whole = finish(tmp_path, "whole", **QUICK)
    with Signals(9), pytest.raises(Stopped, match="after step 10, which is saved"):
        finish(tmp_path, **QUICK)
    assert newest(tmp_path / "run").name == "step-00000010"
    start(tmp_path, existing="resume", **QUICK).run()
    assert_same_run(whole, tmp_path / "run")


def test_stops_amid_failing_steps_do_not_cost_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, range(21, 37))
    settings = {"train__skip_limit": 15, "train__checkpoint_every": 20, "train__steps": 60}
    hopeless = {**settings, "target__loss": 1e-9}  # so none is kept for having held it
    with contextlib.suppress(TargetMissed):
        finish(tmp_path, "whole", **hopeless)
    for number, step in enumerate((22, 25, 28)):
        with Signals(step), pytest.raises(Stopped):
            start(tmp_path, existing="resume" if number else "refuse", **hopeless).run()
        assert (tmp_path / "run" / "checkpoints" / "step-00000020").exists()
    with contextlib.suppress(TargetMissed):
        start(tmp_path, existing="resume", **hopeless).run()
    assert returns(tmp_path / "run") == returns(tmp_path / "whole") == [(40, 20)]
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_failing_last_step_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, range(17, 18))
    run = finish(tmp_path, train__checkpoint_every=100, **QUICK)
    assert returns(run) == []
    assert newest(run).name == "step-00000018"
    assert read(run / "summary.json")["skipped_steps"] == 1
