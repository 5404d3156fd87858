"""Torch-Pruning: runs, their steps, and the command."""

import sys
from pathlib import Path

import pytest
import torch

from gaugelasso.baselines.torch_pruning_choice import (
    Mode,
)
from gaugelasso.baselines.torch_pruning_run import (
    RegularizedStep,
)
from gaugelasso.models import Transformer
from gaugelasso.report import write_report
from gaugelasso.report.data import load_run
from gaugelasso.runs.checkpoint import load_model
from tests.baselines.replayed import ReplayedStep
from tests.baselines.torch_pruning_runs import plan_of, start
from tests.command import Command, assert_user_error
from tests.tiny_runs import assert_same_run, keep_images, read, rows, stop_at

# --- runs -----------------------------------------------------------------------------------


def test_a_run_by_group_norm_is_regularised_pruned_and_tuned(run: Path) -> None:
    full, plan = read(run / "summary.json"), plan_of(run, "group-norm")
    trainer = start(run, plan, "pruned")
    summary = trainer.run()
    folder = trainer.folder.path
    assert (summary["method"], summary["held"]) == ("torch-pruning-group-norm", True)
    assert 0.7 * plan.fma < summary["fma_final"] <= plan.fma
    assert (summary["steps"], summary["frozen_step"]) == (14 + 2 * 4 + 12, 22)
    events = rows(folder, "events.jsonl")
    assert [event["step"] for event in events] == [14, 18]
    assert events[0]["fma"] <= (full["fma_final"] + plan.fma) / 2
    # Nothing is balanced, so there is no such loss.
    assert all(event["loss_balanced"] is None for event in events)
    rates = {row["step"]: row["lr"] for row in rows(folder, "metrics.jsonl")}
    lr, lr_min = trainer.config.compress.lr, trainer.train.lr_min
    assert (rates[10], rates[20]) == (lr, lr_min)
    assert lr_min < rates[25] < lr
    assert summary["training_fma"] > full["training_fma"] == summary["source"]["training_fma"]
    found = summary["torch_pruning"]
    assert (found["mode"], found["sparse"], found["rounds_made"]) == ("group-norm", 14, 2)
    assert load_model(folder).structure() == summary["structure"]


def test_the_steps_before_the_rounds_are_regularised(run: Path) -> None:
    norms = []
    for reg in (0.0, 10.0):
        trainer = start(run, plan_of(run, "group-norm", reg), f"reg{reg:g}")
        stop_at(trainer, 14)
        norms.append(float(trainer.compressor.state.plan.store.weight.norm()))
    assert norms[1] < norms[0]


SUMS = [
    {},
    {"train.accumulate": "3"},
    {"train.accumulate": "2", "train.canonical": "true"},
]


@pytest.mark.parametrize("sums", SUMS, ids=str)
def test_a_step_adds_the_regularisation_of_its_weights_once(
    run: Path, sums: dict[str, str]
) -> None:
    trainer = start(run, plan_of(run, "group-norm", reg=0.5), "pruned", changes=sums)
    trainer.driver.before_step()
    step, store = trainer.state.step, trainer.compressor.state.plan.store
    assert isinstance(step, RegularizedStep)
    assert step.regularizer is not None
    assert isinstance(step.model, Transformer)
    step.load_(0)
    weight, added = store.weight.clone(), step.regularizer.gradients(step.model)
    state = {name: t.clone() for name, t in trainer.compressor.state_tensors().items()}
    step()
    both = {name: part.clone() for name, part in store.views(store.grad).items()}
    step.regularizer = None
    store.weight.copy_(weight)
    for name, tensor in trainer.compressor.state_tensors().items():
        tensor.copy_(state[name])
    step()
    loss = store.views(store.grad)
    assert len(added) > 5
    for name, gradient in both.items():
        expected = loss[name] + added.get(name, 0)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    trainer.folder.close()


@pytest.mark.parametrize("sums", SUMS, ids=str)
def test_replayed_steps_are_those_that_run_plainly(run: Path, sums: dict[str, str]) -> None:
    """To the last bit, through the regularised steps, the rounds and the fine-tuning."""
    plan = plan_of(run, "group-norm", reg=0.5)
    one, other = (start(run, plan, name, changes=sums) for name in ("one", "other"))
    replayed = ReplayedStep(other.state.step.plain)
    other.state.step._step = replayed
    for trainer in (one, other):
        trainer.run()
    assert_same_run(one.folder.path, other.folder.path)
    # With regularisation, and for each structure: a plain step and a recorded one.
    assert replayed.replays == plan.steps - 2 * 3


@pytest.mark.parametrize(("mode", "steps"), [("magnitude", (6,)), ("group-norm", (11, 25))])
def test_a_killed_run_resumes_to_the_same_end(
    run: Path, mode: Mode, steps: tuple[int, ...]
) -> None:
    """Killed within regularised steps, within a round and within the fine-tuning."""
    plan = plan_of(run, mode)
    trainer = start(run, plan, "whole")
    keep_images(trainer, *steps)
    trainer.run()
    for step in steps:
        start(run, plan, str(step), "resume").run()
        assert_same_run(run.parent / "whole", run.parent / str(step))


# --- the command ----------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_a_run_that_reports_know(gaugelasso: Command, run: Path) -> None:
    fma = 0.5 * read(run / "summary.json")["fma_final"]
    options = ("--fma", str(fma), "--rounds", "2", "--corrective", "2", "--finetune", "20")
    code, output, err = gaugelasso("torch-pruning", run, *options)
    assert (code, err) == (0, "")
    out = run / "torch-pruning"
    assert f"run folder: {out}" in output.replace("\n", "")
    summary = load_run(out).summary
    assert summary is not None
    assert summary["method"] == "torch-pruning-magnitude"
    assert summary["fma_final"] <= fma
    assert write_report([out]).page.exists()
    assert gaugelasso("info", out)[0] == 0
    assert gaugelasso("eval", out, "--batches", "1")[0] == 0
    other = (*options[:2], "--rounds", "3", *options[4:], "--resume")
    assert_user_error(gaugelasso("torch-pruning", run, *other), "--resume: rounds = 3, but the run")
    assert gaugelasso("torch-pruning", run, *options, "--resume")[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fma", "nan"), "--fma nan: must be a finite number above 0"),
        (("--fma", "1e9"), "has 624 FMA per token already"),
        (("--fma", "2"), "--fma 2 cannot be reached by pruning"),
        (("--fma", "2"), "the nearest is 51 FMA per token"),
        (
            ("--fma", "300", "--mode", "group-norm", "--reg", "-1"),
            "--reg -1: must be a finite number of at least 0",
        ),
        (("--fma", "300", "--sparse", "9"), "--sparse 9: --mode magnitude trains nothing before"),
        (("--fma", "300", "--reg", "1e-3"), "--reg 0.001: --mode magnitude trains nothing before"),
        (("--fma", "300", "--set", "compress.anchor=1"), "no use of compress.anchor"),
        (("--fma", "300", "--set", "train.steps=3"), "torch-pruning takes train.steps from its"),
    ],
)
def test_what_cannot_be_pruned_is_refused(
    gaugelasso: Command, run: Path, options: tuple[str, ...], message: str
) -> None:
    assert_user_error(gaugelasso("torch-pruning", run, *options), message)
    assert not (run / "torch-pruning").exists()


def test_a_missing_package_is_named_with_its_extra(
    gaugelasso: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    answer = gaugelasso("torch-pruning", run, "--fma", "300")
    assert_user_error(answer, "pip install 'gaugelasso[torch-pruning]'")
    assert not (run / "torch-pruning").exists()
