"""Runs that miss their target, have weights that are no numbers, or name a wrong device."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso.errors import UserError
from gaugelasso.runs import checkpoint
from gaugelasso.training.evaluation import configure_cpu_
from gaugelasso.training.trainer import TargetMissed, Trainer, choose_device
from tests.tiny import tiny
from tests.tiny_runs import (
    final_tensors,
    finish,
    plain,
    read,
    rows,
    start,
    start_at,
)


def test_a_target_out_of_reach_is_said_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(TargetMissed) as error:
        finish(tmp_path, target__loss=0.01)
    run = tmp_path / "run"
    for part in ("target.loss = 0.01 was never reached in 40 steps", str(run / "checkpoints")):
        assert part in str(error.value)
    best = min(row["loss"] for row in rows(run, "metrics.jsonl"))
    assert f"best training loss {best:.4g})" in str(error.value)
    summary = read(run / "summary.json")
    assert summary["target_reached_step"] is None
    assert summary["compression"] == 1.0
    assert rows(run, "events.jsonl") == []
    model = checkpoint.load_model(run)
    assert plain(model.structure()) == read(run / "initial.json")["structure"]


def test_a_lucky_batch_does_not_make_a_target_reached(tmp_path: Path) -> None:
    """Only the mean of a row does."""
    with pytest.raises(TargetMissed, match=r"loss = 0\.95"):
        finish(tmp_path, target__loss=0.95)
    summary = read(tmp_path / "run" / "summary.json")
    assert summary["target_reached_step"] is not None
    assert not summary["held"]


def test_a_held_out_loss_that_is_no_number_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gaugelasso.training.evaluation.evaluate", lambda *_: (math.nan,) * 3)
    run = finish(tmp_path)
    summary = json.loads((run / "summary.json").read_text(), parse_constant=pytest.fail)
    assert (summary["loss"], summary["held"]) == (None, False)
    assert summary["metric"]["value"] is None


def test_a_missed_target_does_not_claim_a_full_model_that_is_none(tmp_path: Path) -> None:
    """A solver that presses without a target may shrink the model and still miss it."""
    with pytest.raises(TargetMissed) as error:
        finish(tmp_path, target__loss=0.01, compress__solver="fixed", compress__rho=1.0)
    assert read(tmp_path / "run" / "summary.json")["compression"] > 1
    assert "nothing was compressed" not in str(error.value)


def ruin(trainer: Trainer, at: int) -> None:
    """Weights that are no numbers after this step, whose own loss is one."""
    take = trainer._step

    def one() -> Any:
        event = take()
        if trainer.compressor.steps == at:
            trainer.compressor.optimizer.store.weight.fill_(math.nan)
        return event

    trainer._step = one  # type: ignore[method-assign]


@pytest.mark.parametrize("at", [20, 38, 40])
def test_weights_that_are_no_numbers_never_reach_a_checkpoint(tmp_path: Path, at: int) -> None:
    """At a step that is saved, shortly before the end, at the end: the run goes back."""
    trainer = start_at(tmp_path, at - 3)
    ruin(trainer, at)
    summary = trainer.run()
    assert summary["returns"] == 1
    assert math.isfinite(summary["loss"])
    assert all(t.isfinite().all() for t in final_tensors(tmp_path / "run").values())


def test_weights_that_are_no_numbers_before_anything_was_saved_end_the_run(tmp_path: Path) -> None:
    trainer = start(tmp_path)
    ruin(trainer, at=10)
    with pytest.raises(
        UserError, match=r"a weight is NaN or infinite at step 10 .*no checkpoint yet"
    ):
        trainer.run()
    assert not list(trainer.folder.checkpoints.glob("*"))


@pytest.mark.parametrize("name", ["tpu", "", "cpu:1", "meta", "cuda:-1", "cuda:99", "mps"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"device {name!r}"):
        choose_device(name)


def test_a_device_is_found_by_itself() -> None:
    assert choose_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'cuda' is not there"):
        start(tmp_path, train__device="cuda")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("machine", "on"), [("aarch64", False), ("x86_64", True)])
def test_small_products_on_arm_go_without_onednn(
    machine: str, on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    before = torch._C._get_mkldnn_enabled()
    try:
        torch.backends.mkldnn.set_flags(True, _fp32_precision=None)
        configure_cpu_(tiny(tmp_path), "cpu")
        assert torch._C._get_mkldnn_enabled() is on
        configure_cpu_(tiny(tmp_path, train__precision="bfloat16"), "cpu")
        assert torch._C._get_mkldnn_enabled()
    finally:
        torch.backends.mkldnn.set_flags(before, _fp32_precision=None)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("another"), False),
    ],
)
def test_a_run_that_cannot_begin_leaves_no_folder(
    error: Exception, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path)
    one = type(config.task).batch

    def batch(task: Any, count: int, *where: Any) -> Any:
        if count > 1:
            raise error
        return one(task, count, *where)

    monkeypatch.setattr(type(config.task), "batch", batch)
    expected = f"train.batch = {config.train.batch} do not fit the memory" if named else "another"
    for folder, remains in (("new", False), ("there", True)):
        out = tmp_path / folder
        if remains:
            out.mkdir()
        with pytest.raises(UserError if named else RuntimeError, match=expected):
            Trainer(config, out)
        assert out.exists() is remains
    assert list((tmp_path / "there").iterdir()) == []
