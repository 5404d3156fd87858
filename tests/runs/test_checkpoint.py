"""Checkpoints: what they contain, how they are written, and that damaged ones are refused."""

import errno
import json
import math
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.errors import UserError
from gaugelasso.files import durable
from gaugelasso.files.tensors import encoded
from gaugelasso.runs import checkpoint, manifest
from gaugelasso.tasks import Draw
from gaugelasso.training.trainer import Trainer
from tests.tiny import tiny
from tests.tiny_runs import contents, newest, sign

Corruption = Callable[[Path], None]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A finished tiny run whose structure has shrunk, with at least one operator left."""
    folder = tmp_path_factory.mktemp("checkpoint")
    trainer = Trainer(tiny(folder, compress__powers_of_two=True), folder / "run")
    trainer.run()
    assert trainer.compressor.fma < trainer.compressor.fma_initial / 1.5
    return trainer


@pytest.fixture
def folder(trainer: Trainer, tmp_path: Path) -> Path:
    """A copy of its checkpoint, to be damaged."""
    return Path(shutil.copytree(newest(trainer.folder.path), tmp_path / "step-00000040"))


# --- what is in it -------------------------------------------------------------------


def test_it_is_json_and_safetensors_alone(folder: Path) -> None:
    names = {"structure.json", "model.safetensors", "optimizer.safetensors", "state.json"}
    names |= {"random.safetensors", "manifest.json"}
    assert {path.name for path in folder.iterdir()} == names
    for path in folder.glob("*.json"):
        json.loads(path.read_text())
    for path in folder.glob("*.safetensors"):
        # Eight bytes of header length, a JSON header, raw numbers: a pickle has no place in it.
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        numbers = [entry["data_offsets"] for key, entry in header.items() if key != "__metadata__"]
        assert len(data) == 8 + length + max(end for _, end in numbers)


def test_it_loads_without_pickle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle")

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    checkpoint.load_model(folder)
    checkpoint.load_state(folder)


def test_the_model_reloads_to_the_same_outputs(trainer: Trainer, folder: Path) -> None:
    model = checkpoint.load_model(folder)
    inputs, _ = trainer.task.batch(5, Draw(1), "cpu")
    with torch.no_grad():
        assert torch.equal(model.eval()(inputs), trainer.model.eval()(inputs))
    assert model.structure() == trainer.compressor.structure
    here, there = named_tensors(model), named_tensors(trainer.model)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)


def test_the_state_is_all_that_training_goes_on_from(trainer: Trainer, folder: Path) -> None:
    state, tensors = checkpoint.load_state(folder)
    assert state["steps"] == 40
    assert state["training_fma"] == trainer.record.training_fma
    live = trainer.compressor.state_tensors()
    assert tensors.keys() == live.keys()
    assert all(torch.equal(tensors[name], live[name]) for name in live)


# --- how it is written ---------------------------------------------------------------


def test_a_crash_while_writing_leaves_the_previous_one(
    trainer: Trainer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, home = contents(folder), folder.parent

    def full_disk(*_: Any) -> str:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(checkpoint, "write_new", full_disk)
    with pytest.raises(UserError, match="cannot be written: no space"):
        checkpoint.save(home, trainer.compressor, trainer.state.numbers())
    assert contents(folder) == before
    monkeypatch.undo()
    (home / "step-00000030.tmp").mkdir()  # left by a crash; it must not disturb
    checkpoint.save(home, trainer.compressor, trainer.state.numbers())
    assert [path.name for path in home.iterdir()] == ["step-00000040"]


def test_a_crash_between_the_renames_is_survived(folder: Path) -> None:
    folder.rename(folder.with_name("step-00000040.replaced"))
    assert checkpoint.find(folder.parent).path.name == "step-00000040.replaced"
    assert checkpoint.load_state(folder.parent)[0]["steps"] == 40


def test_the_newest_few_stay(trainer: Trainer, tmp_path: Path) -> None:
    steps = trainer.compressor.steps
    try:
        for step in (7, 8, 100_000_000, 9, 10, 10):  # one from before a rollback
            trainer.compressor.steps = step
            checkpoint.save(tmp_path, trainer.compressor, {}, keep=3)
    finally:
        trainer.compressor.steps = steps
    kept = ["step-00000008", "step-00000009", "step-00000010"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_what_is_written_is_what_the_library_reads(tmp_path: Path) -> None:
    held = {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "turned": torch.arange(6.0).view(2, 3).T,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "double": torch.ones(2, dtype=torch.float64),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
        "sites": torch.arange(3),
    }
    durable.write_new(tmp_path / "held", encoded(held))
    for name, tensor in load_file(tmp_path / "held").items():
        assert torch.equal(tensor, held.pop(name))
        assert tensor.is_contiguous()
    assert not held


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["weight", "momentum", "second", "smoothed", "buffer", "state"])
def test_what_is_not_finite_is_never_written(
    trainer: Trainer, folder: Path, part: str, value: float
) -> None:
    """Otherwise it would replace the last good checkpoint."""
    compressor, state = trainer.compressor, trainer.state.numbers()
    broken = {
        "weight": compressor.optimizer.store.weight,
        "momentum": compressor.optimizer.momentum,
        "second": compressor.optimizer.second,
        "smoothed": compressor.scalars.smoothed.view(1),
        "buffer": named_tensors(trainer.model)["classifier.read.weight"],
        "state": torch.zeros(1),
    }[part]
    kept, before = broken.clone(), contents(folder.parent)
    with torch.no_grad():
        broken[-1] = value
    state["best_loss"] = value if part == "state" else 0.0
    try:
        with pytest.raises(UserError, match="not a finite number"):
            checkpoint.save(folder.parent, compressor, state)
    finally:
        with torch.no_grad():
            broken.copy_(kept)
    assert contents(folder.parent) == before


def test_a_damaged_one_is_passed_over_aloud(
    trainer: Trainer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = Path(shutil.copytree(newest(trainer.folder.path), folder.with_name("copy")))
    state = json.loads((older / "state.json").read_text())
    (older / "state.json").write_text(json.dumps(state | {"steps": 30}))
    manifest = json.loads((older / "manifest.json").read_text())
    (older / "manifest.json").write_text(json.dumps(manifest | {"step": 30}))
    sign(older)
    older.rename(folder.with_name("step-00000030"))
    assert checkpoint.load_state(folder.parent)[0]["steps"] == 40
    assert not caplog.messages
    truncate(folder)
    assert checkpoint.load_state(folder.parent)[0]["steps"] == 30
    (warning,) = caplog.messages
    assert re.search(r"^warning: '.*40/model\.safetensors': damaged, .* bytes", warning)
    assert "step-00000030" in warning
    truncate(folder.with_name("step-00000030"))
    with pytest.raises(UserError, match=r"40/model\.safetensors'.*no intact checkpoint"):
        checkpoint.load_state(folder.parent)


def test_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint"):
        checkpoint.load_model(tmp_path / "checkpoint")


# --- what is refused -----------------------------------------------------------------


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Corruption:
    """Rewrite the model's tensors after `change`."""

    def corrupt(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors")

    return corrupt


def structure(change: Callable[[dict[str, Any]], Any]) -> Corruption:
    """Rewrite the structure after `change`."""

    def corrupt(folder: Path) -> None:
        data = json.loads((folder / "structure.json").read_text())
        change(data)
        (folder / "structure.json").write_text(json.dumps(data))

    return corrupt


def text(name: str, content: str) -> Corruption:
    return lambda folder: (folder / name).write_text(content) and None


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flip(sites: Tensor) -> None:
    sites.copy_(sites.flip(0))


WEIGHTS = {
    "truncated": (truncate, "not a readable safetensors file"),
    "garbage": (text("model.safetensors", "garbage"), "too short, the structure needs"),
    "absent": (lambda folder: (folder / "model.safetensors").unlink(), "no such file"),
    "a tensor missing": (
        tensors(lambda held: held.pop("classifier.out")),
        "'classifier.out' of the structure is missing",
    ),
    "a tensor too many": (
        tensors(lambda held: held.update(stray=torch.zeros(2))),
        "'stray' is not in the structure",
    ),
    "a wrong shape": (
        tensors(lambda held: held.update({"embedding.table": torch.zeros(3, 3)})),
        r"'embedding.table' is \(3, 3\) float32, the structure needs \(8, \d\) float32",
    ),
    "a wrong dtype": (
        tensors(lambda held: held.update({"classifier.out": held["classifier.out"].double()})),
        r"float64, the structure needs .* float32",
    ),
    "other sites": (
        tensors(lambda held: flip(held["classifier.read.sites"])),
        "'classifier.read.sites' names other sites than the structure",
    ),
}

STRUCTURES = {
    "no JSON": (text("structure.json", "{"), "not a readable JSON file"),
    "absent": (lambda folder: (folder / "structure.json").unlink(), "no such file"),
    "a list": (text("structure.json", "[]"), "a structure is a JSON object, not list"),
    "a key missing": (structure(lambda data: data.pop("length")), "'length' is missing"),
    "an unknown key": (structure(lambda data: data.update(depth=3)), "unknown key 'depth'"),
    "an unknown operator": (
        structure(lambda data: data["operators"][0].update(kind="convolution")),
        "'convolution' is neither",
    ),
    "an operator's key missing": (
        structure(lambda data: data["operators"][0].pop("reads")),
        "'reads' is missing",
    ),
    "operators that are none": (structure(lambda data: data.update(operators=3)), "operators"),
    "an operator that is none": (structure(lambda data: data.update(operators=[3])), "operator"),
    "sites that are none": (structure(lambda data: data.update(sites=3)), "sites|width"),
    "reads that are none": (
        structure(lambda data: data["operators"][0].update(reads=None)),
        "reads",
    ),
    "a negative width": (
        structure(lambda data: data["operators"][0].update(values=-1)),
        "values = -1",
    ),
    "a site outside": (structure(lambda data: data.update(embed=[99])), "site 99 is outside"),
    "a site twice": (structure(lambda data: data.update(embed=[0, 0])), "twice"),
    "an operator twice": (
        structure(lambda data: data["operators"].append(data["operators"][0])),
        "appears twice",
    ),
    "an unknown norm": (structure(lambda data: data.update(norm="batch")), "norm"),
    "frequencies of words": (
        structure(lambda data: data["operators"][0].update(frequencies=["fast", "slow"])),
        "frequencies",
    ),
    "a wider network": (
        structure(lambda data: data["operators"][0].update(values=7)),
        "the structure needs",
    ),
    "fewer outputs": (structure(lambda data: data.update(outputs=5)), "the structure needs"),
}


@pytest.mark.parametrize(("corrupt", "message"), WEIGHTS.values(), ids=WEIGHTS.keys())
def test_tensors_that_do_not_match_are_refused(
    folder: Path, corrupt: Corruption, message: str
) -> None:
    corrupt(folder)
    sign(folder)
    with pytest.raises(UserError, match=rf"model\.safetensors'.*{message}"):
        checkpoint.load_model(folder)


@pytest.mark.parametrize(("corrupt", "message"), STRUCTURES.values(), ids=STRUCTURES.keys())
def test_a_structure_that_is_none_is_refused(
    folder: Path, corrupt: Corruption, message: str
) -> None:
    corrupt(folder)
    sign(folder)
    with pytest.raises(UserError, match=rf"(structure\.json|model\.safetensors)'.*({message})"):
        checkpoint.load_model(folder)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (text("optimizer.safetensors", "garbage"), "not a readable safetensors file"),
        (lambda folder: (folder / "optimizer.safetensors").unlink(), "no such file"),
        (text("state.json", "{"), "not a readable JSON file"),
    ],
    ids=["garbage", "absent", "no JSON"],
)
def test_a_state_that_cannot_be_read_is_refused(
    folder: Path, corrupt: Corruption, message: str
) -> None:
    corrupt(folder)
    sign(folder)
    with pytest.raises(UserError, match=message):
        checkpoint.load_state(folder)


@pytest.mark.parametrize(("wanted", "shown"), [(54416, "54,416"), ("many", "'many'")])
def test_sizes_of_a_damaged_file_are_written_alike(
    tmp_path: Path, wanted: object, shown: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(1000))
    message = f"damaged, 1,000 bytes where the manifest has {shown}$"
    with pytest.raises(UserError, match=message):
        manifest._check_file(path, {"bytes": wanted, "sha256": ""})
