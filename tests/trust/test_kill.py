"""kill -9 at any moment: a resumed run becomes bit-identical to one that never died.

A few points here; `make torture` tries hundreds.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gaugelasso.models import Transformer
from gaugelasso.runs.checkpoint import Checkpoint
from gaugelasso.tasks import Retrieval
from tests.tiny import QUICK, settings
from tests.tiny_runs import assert_same_run, finish, finished, killed, start, stop_at
from tests.trust.children import SETTINGS, Runs, assert_resumes
from tests.trust.traps import Bytes, Lines, Where


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs in one folder, with a reference that was never killed."""
    quick = (f"{key}={value}" for key, value in settings(**QUICK).items())
    runs = Runs(tmp_path_factory.mktemp("killed"), (*SETTINGS, *quick))
    assert runs.run("whole") == 0, runs.log("whole")
    return runs


@pytest.mark.parametrize("where", ["event", "save"])
def test_killed_inside(runs: Runs, where: Where) -> None:
    total, chance = runs.count(f"count-{where}", Lines(where)), random.Random(1)
    for number in range(2):
        name = f"{where}-{number}"
        assert runs.run(name, trap=Lines(where, chance.randint(1, total))) == -9
        assert_resumes(runs, "whole", name)


@pytest.mark.parametrize("at", [5_000, 60_000])
def test_killed_in_the_middle_of_a_write(runs: Runs, at: int) -> None:
    assert runs.run(f"write-{at}", trap=Bytes(at, error=None)) == -9
    assert_resumes(runs, "whole", f"write-{at}")


def test_killed_again_and_again(runs: Runs) -> None:
    chance = random.Random(2)
    for number in range(4):
        runs.killed("again", chance.uniform(0.1, 0.4), *(["--resume"] if number else []))
    assert_resumes(runs, "whole", "again")


# --- what would be missed ----------------------------------------------------------------


def forgotten(
    monkeypatch: pytest.MonkeyPatch, what: Callable[[dict[str, Any], dict[str, Tensor]], None]
) -> None:
    """One part of a checkpoint is not restored, as if it had not been saved."""
    inner = Checkpoint.state

    def state(self: Checkpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
        held, tensors = inner(self)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        what(held, tensors)
        return held, tensors

    monkeypatch.setattr(Checkpoint, "state", state)


def zeroed(prefix: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def forget(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            tensors[name].zero_()

    return forget


def fresh(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda state, _: state.update({key: value})


PARTS = {
    "momentum": zeroed("momentum."),
    "second moments": zeroed("second."),
    "bias correction": zeroed("decay"),
    "smoothed loss": zeroed("smoothed"),
    "losses seen": zeroed("seen"),
    "whether pressing began": zeroed("begun"),
    "losses not yet logged": fresh("unlogged", []),
    "the last evaluation": fresh("metric", None),
    "work so far": fresh("training_fma", 0.0),
    "when the target was reached": fresh("reached_at", None),
}
# Checkpoints between rows and between events, so that they contain partial intervals.
ODD: dict[str, Any] = {
    "train__checkpoint_every": 14,
    "train__eval_every": 20,
    "compress__loss_smoothing": 0.9,
    "train__steps": 35,
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("odd"), **ODD)


def assert_other_run(odd: Path, tmp_path: Path) -> None:
    killed(tmp_path, 30, **ODD)
    start(tmp_path, existing="resume", **ODD).run()
    with pytest.raises(AssertionError):
        assert_same_run(odd, tmp_path / "run")


def test_nothing_forgotten_nothing_changed(odd: Path, tmp_path: Path) -> None:
    killed(tmp_path, 30, **ODD)
    start(tmp_path, existing="resume", **ODD).run()
    assert_same_run(odd, tmp_path / "run")


@pytest.mark.parametrize("part", PARTS)
def test_a_part_left_out_shows(
    odd: Path, tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten(monkeypatch, PARTS[part])
    assert_other_run(odd, tmp_path)


@pytest.mark.parametrize("leaf", ["weight", "gain"])
def test_a_tensor_of_the_model_left_out_shows(
    odd: Path, tmp_path: Path, leaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and slow norm weights. Energies are not tried: every step measures them again."""
    inner = Checkpoint.model

    def model(self: Checkpoint, device: str = "cpu") -> Transformer:
        built = inner(self, device)
        with torch.no_grad():
            getattr(built.classifier.read, leaf).fill_(1.0)
        return built

    monkeypatch.setattr(Checkpoint, "model", model)
    assert_other_run(odd, tmp_path)


def test_generators_left_out_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the package draws from torch's generators, but a user's loss may."""
    loss = Retrieval.loss

    def noisy(self: Retrieval, outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(self, outputs + 0.01 * torch.randn_like(outputs), targets)

    monkeypatch.setattr(Retrieval, "loss", noisy)
    torch.manual_seed(5)
    short = {**ODD, **QUICK, "train__checkpoint_every": 8}
    whole = finish(tmp_path, "whole", **short)
    for name in ("kept", "lost"):
        torch.manual_seed(5)
        stop_at(start(tmp_path, name, **short), 11)
        torch.manual_seed(6)
        if name == "lost":
            monkeypatch.setattr(Checkpoint, "restore_random_", lambda self: None)
        start(tmp_path, name, "resume", **short).run()
    assert_same_run(whole, tmp_path / "kept")
    with pytest.raises(AssertionError):
        assert_same_run(whole, tmp_path / "lost")
