"""A run of a model whose token table is also its head: cut, stopped, resumed and reported."""

import shutil
from pathlib import Path

import pytest
import torch

from gaugelasso.config import load_config
from gaugelasso.runs import checkpoint
from gaugelasso.runs.folder import Existing
from gaugelasso.training.trainer import Trainer
from tests.command import Command
from tests.tiny import TIED
from tests.tiny_runs import assert_same_run, final_tensors, keep_images, outcome, read, rows


def start(folder: Path, name: str, existing: Existing = "refuse") -> Trainer:
    config = folder / "tied.toml"
    config.write_text(TIED)
    return Trainer(load_config(config, {}), folder / name, existing)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = start(tmp_path_factory.mktemp("tied"), "run")
    keep_images(trainer, 23)
    trainer.run()
    return trainer.folder.path


def test_the_table_is_one_parameter_that_is_cut_and_stays_tied(run: Path) -> None:
    tensors = final_tensors(run, ("model",))
    assert "embedding.table" in tensors
    assert "classifier.out" not in tensors
    model = checkpoint.load_model(run)
    kept = len(model.classifier.read.gain)
    widths = read(run / "initial.json")["widths"]
    assert 0 < kept < widths["embedding.d_e"]
    assert model.embedding.table.shape[1] == kept == len(model.embedding.write.scale)
    assert model.classifier.out.data_ptr() == model.embedding.table.data_ptr()
    assert model.spec().tied_head
    # What was counted is what there is.
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert outcome(run)["parameters_final"] == parameters


def test_a_run_that_was_killed_comes_to_the_same_end(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run.with_name("23"), tmp_path / "run")
    assert any(event["dropped"] for event in rows(tmp_path / "run", "events.jsonl"))
    start(tmp_path, "run", "resume").run()
    assert_same_run(run, tmp_path / "run")


def test_info_and_report_know_the_one_axis(run: Path, gaugelasso: Command) -> None:
    code, told, _ = gaugelasso("info", run)
    assert code == 0
    code, said, _ = gaugelasso("report", run)
    assert code == 0
    widths = read(run / "initial.json")["widths"]
    assert "classifier.d_c" not in widths
    assert f"of {widths['embedding.d_e']}" in told
    assert "d_c " not in told + said


def test_outputs_are_those_of_the_table_used_twice(run: Path) -> None:
    model = checkpoint.load_model(run).eval()
    tokens = torch.arange(model.initial_spec.length)[None] % model.initial_spec.inputs
    with torch.no_grad():
        before = model(tokens)
        model.embedding.table[:, 0] *= 4
        model.embedding.write.scale[0] /= 4
        assert not torch.allclose(model(tokens), before)
        model.classifier.read.gain[0] /= 4
        assert torch.equal(model(tokens), before)
