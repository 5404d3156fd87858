"""A rival goes on with the model that it began with, in whatever folder, and with no other."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso.baselines.cofi import CofiPlan
from gaugelasso.baselines.rival import RivalTrainer
from gaugelasso.baselines.source import Source
from gaugelasso.compress.result import TargetMissed
from gaugelasso.errors import UserError
from gaugelasso.runs.folder import Existing
from gaugelasso.training.trainer import Trainer
from tests.baselines import cofi_runs, test_prune, torch_pruning_runs
from tests.command import Command, assert_user_error
from tests.tiny import tiny
from tests.tiny_runs import contents, final_tensors, finished, outcome, read, stop_at

FMA = 300
COFI = CofiPlan("fma", FMA, warmup=4, prune=12, finetune=8, distill=0.5, mask_rate=0.1)
OTHER_MODEL = "is not the one that the run in"


def rival(method: str, run: Path, out: Path, existing: Existing = "refuse") -> RivalTrainer:
    """A short run of a method; `out` may be in another folder than the run."""
    name = os.path.relpath(out, run.parent)
    if method == "cofi":
        return cofi_runs.start(run, COFI, name, existing)
    if method == "torch-pruning":
        plan = torch_pruning_runs.plan_of(run)
        return torch_pruning_runs.start(run, plan, name, existing)
    return test_prune.start(run, test_prune.to_work(run, FMA), name, existing)


@pytest.fixture(params=["prune", "cofi", "torch-pruning"])
def method(request: pytest.FixtureRequest) -> str:
    if request.param == "torch-pruning":
        pytest.importorskip("torch_pruning")
    return str(request.param)


def killed(method: str, run: Path) -> Path:
    """The folder of a rival that was killed between two checkpoints."""
    out = run.parent / "rival"
    stop_at(rival(method, run, out), 13)
    return out


def finish(trainer: RivalTrainer) -> None:
    with contextlib.suppress(TargetMissed):  # CoFi has too few steps to reach it
        trainer.run()


def replace_model(run: Path) -> None:
    """Put another run of the same config and steps into its folder."""
    shutil.rmtree(run)
    changes: dict[str, Any] = {"compress__solver": "fixed", "target__loss": 1e30}
    finished(run.parent, run.name, train__seed=4, **changes)


def as_early_versions_wrote_it(path: Path) -> None:
    """Take the identity of the source out of a plan."""
    plan = read(path)
    del plan["run_sha256"]
    path.write_text(json.dumps(plan))


def of_source(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary["source"].items() if key != "run"}


def test_another_run_in_the_folder_of_the_source_is_refused(method: str, run: Path) -> None:
    out = killed(method, run)
    replace_model(run)
    before = contents(out)
    with pytest.raises(UserError, match=OTHER_MODEL) as refused:
        rival(method, run, out, "resume")
    assert str(refused.value).count(str(run)) == 2  # where it is sought, and where it was
    assert str(out) in str(refused.value)
    assert contents(out) == before


def test_moved_folders_go_on_to_the_same_end(method: str, run: Path) -> None:
    finish(rival(method, run, run.parent / "whole"))
    out = killed(method, run)
    there = run.parent / "elsewhere"
    there.mkdir()
    run.rename(there / "full")
    out.rename(there / "rival")
    finish(rival(method, there / "full", there / "rival", "resume"))
    whole, moved = (outcome(each) for each in (run.parent / "whole", there / "rival"))
    assert of_source(moved) == of_source(whole)
    assert moved["source"]["run"] == str(there / "full")
    assert moved["training_work"] == whole["training_work"]
    tensors, others = final_tensors(run.parent / "whole"), final_tensors(there / "rival")
    assert all(torch.equal(tensors[name], others[name]) for name in tensors | others)


def test_the_plan_says_which_model_it_began_with(run: Path) -> None:
    plan = read(killed("prune", run) / "prune.json")
    assert plan["run"] == str(run)
    assert plan["run_sha256"] == Source.of(run).fingerprint


def test_the_command_refuses_another_model_and_takes_another_name(
    gaugelasso: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = killed("prune", run)
    shutil.copytree(run, run.parent / "kept")
    replace_model(run)
    phases = ("--rounds", "4", "--corrective", "3", "--finetune", "8")
    words = ("--fma", str(FMA), *phases, "--out", out, "--resume")
    assert_user_error(gaugelasso("prune", run, *words), OTHER_MODEL)
    monkeypatch.chdir(run.parent)
    code, output, _ = gaugelasso("prune", "kept", *words)
    assert (code, "resuming after step" in output) == (0, True)


def test_of_a_plan_without_the_model_the_folder_counts(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As early versions wrote them: the same folder under another name, and no other."""
    out = killed("prune", run)
    as_early_versions_wrote_it(out / "prune.json")
    shutil.copytree(run, run.parent / "copy")
    with pytest.raises(UserError, match=OTHER_MODEL):
        rival("prune", run.parent / "copy", out, "resume")
    monkeypatch.chdir(run.parent)
    rival("prune", Path(run.name), out, "resume").run()
    assert read(out / "summary.json")["held"]


@pytest.mark.parametrize("whose", ["its own", "that of another run"])
def test_the_source_is_not_overwritten(method: str, run: Path, whose: str) -> None:
    """Nor is a folder that holds it, as a run does whose reference is the full model."""
    if whose != "its own":
        holder = finished(run.parent, "holder")
        run = run.rename(holder / "reference")
    before = contents(run.parent)
    name = "run" if whose == "its own" else "holder"
    with pytest.raises(UserError, match=f"{name}' is or holds .*{run.name}', which the run begins"):
        rival(method, run, run if whose == "its own" else run.parent, "overwrite")
    assert contents(run.parent) == before


def test_another_command_does_not_go_on_with_a_rival(run: Path) -> None:
    """The config is the same, so that the figures of one would get the name of the other."""
    pytest.importorskip("torch_pruning")
    out = run.parent / "rival"
    rival("prune", run, out).run()
    before = contents(out)
    with pytest.raises(UserError, match=r"has prune\.json, so that `gaugelasso prune` began it"):
        rival("torch-pruning", run, out, "resume")
    with pytest.raises(UserError, match=r"has prune\.json, so that `gaugelasso prune` began it"):
        Trainer(tiny(run.parent), out, "resume")
    (out / "prune.json").unlink()
    with pytest.raises(UserError, match=r"has no prune\.json, so that another command began it"):
        rival("prune", run, out, "resume")
    assert contents(out) == {name: before[name] for name in before if name != "prune.json"}


def test_an_overwritten_rival_leaves_no_plan(run: Path) -> None:
    out = killed("prune", run)
    Trainer(tiny(run.parent), out, "overwrite").run()
    assert not (out / "prune.json").exists()
    Trainer(tiny(run.parent), out, "resume").run()
