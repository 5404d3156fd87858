"""The native form: what is loaded computes the same, without the trainer's dependencies."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gaugelasso.errors import UserError
from gaugelasso.export import export
from gaugelasso.inference import InferenceModel, load, load_weights, tuned
from tests.contract.models import TRANSFORMERS, Case, make
from tests.export.sources import (
    card_example,
    greedy,
    page_examples,
    run_example,
    spread_of,
    tiny,
    write_run,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run = write_run(Path("runs/small"), tiny())
    return export(run, "native").folder


def test_the_examples_of_card_and_page_generate(folder: Path) -> None:
    program = card_example(folder)
    assert program in page_examples()
    assert run_example(program) == greedy(tiny(), [list(b"The ")], 20)[0]


@pytest.mark.parametrize("case", [case for case in TRANSFORMERS if case.dropped], ids=str)
@torch.inference_mode()
def test_what_is_loaded_is_the_model(case: Case, tmp_path: Path) -> None:
    model = make(case).float()
    done = export(write_run(tmp_path / "run", model), "native", tmp_path / "out")
    inputs = case.row.inputs(model, torch.Generator().manual_seed(1))
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    assert torch.equal(load(done.folder)(inputs), InferenceModel(model)(inputs))
    assert done.deviation < 1e-5


@torch.inference_mode()
def test_half_precision_halves_the_file(folder: Path) -> None:
    half = export(Path("runs/small"), "native", Path("half"), "bfloat16")
    sizes = [(each / "model.safetensors").stat().st_size for each in (folder, half.folder)]
    assert sizes[1] < 0.75 * sizes[0]  # the header stays
    tokens = torch.arange(24)[None]
    served = load(half.folder, dtype=torch.bfloat16)
    assert served.dtype == torch.bfloat16
    assert 0 < spread_of(tiny(), served(tokens), InferenceModel(tiny())(tokens)) < 0.5
    assert tuned(load_weights(half.folder), tokens, repeats=1)(tokens).dtype == torch.float32


def test_reading_needs_no_package_of_training_or_display(folder: Path) -> None:
    program = """
import sys
for name in ("typer", "rich", "matplotlib", "datasets", "onnx", "transformers"):
    sys.modules[name] = None
import torch
from gaugelasso.inference import load
print(load(sys.argv[1])(torch.zeros(1, 3, dtype=torch.long)).shape)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, folder], capture_output=True, text=True, check=True
    )
    assert done.stdout == "torch.Size([1, 3, 256])\n"


def test_damaged_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"structure.json': not a readable structure .*No such file"
    ):
        load(tmp_path / "none")
    weights, structure = folder / "model.safetensors", folder / "structure.json"
    data = json.loads(structure.read_text())
    structure.write_text(json.dumps(data | {"inputs": 255}))
    with pytest.raises(UserError, match=r"'embedding.table' has shape \(256, \d\), the structure"):
        load(folder)
    structure.write_text(json.dumps(data | {"inputs": 2**30}))
    with pytest.raises(UserError, match="too short, the structure needs"):
        load(folder)
    structure.write_text(json.dumps(data | {"positions": False}))
    with pytest.raises(UserError, match=r"'embedding.positions' is not in the structure"):
        load(folder)
    structure.write_text(json.dumps(data | {"inputs": "many"}))
    with pytest.raises(UserError, match="inputs = 'many' is not int"):
        load(folder)
    structure.write_text(json.dumps(data))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model.safetensors': not a readable safetensors file"):
        load(folder)
