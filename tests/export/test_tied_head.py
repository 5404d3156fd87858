"""Exports of a model whose token table is also its head hold the table once.

Of ONNX files tests/export/test_onnx.py says so.
"""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from gaugelasso.export import export, to_pt2
from gaugelasso.export.stock import stock_sizes, stock_weights
from gaugelasso.importing import import_model
from gaugelasso.importing.decoder import FOLDER
from gaugelasso.inference import InferenceModel
from gaugelasso.models import Transformer
from tests.compress.test_shape import compressor, cut_to
from tests.export.sources import spread_of, stock, tiny, write_run

TIED: dict[str, Any] = {"tied_head": True}
# Large beside all else that a file of a tiny model holds.
WORDS = 4000
TOKENS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))


def model_of() -> Transformer:
    model = tiny(1, TIED | {"head_bias": True, "tied_mean": True}, inputs=WORDS, outputs=WORDS)
    # One for all: of equal tensors, two that are exchanged would go unnoticed.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in ("bias", "mean", "spread"):
            getattr(model.classifier, name).normal_(generator=generator)
    return model


@pytest.mark.parametrize("form", ["hf", "native"])
def test_the_file_holds_the_table_once(form: str, tmp_path: Path) -> None:
    """`export` loads each file again, and compares its outputs."""
    model = model_of()
    done = export(write_run(tmp_path / "run", model, {"name": "own"}), form, tmp_path / "out")
    assert done.deviation < 1e-4
    # The bias and the mean of the outputs are two more numbers for each word.
    columns = model.embedding.table.shape[1] + 2
    assert "classifier is the table of the embedding" in (done.folder / "README.md").read_text()
    size = sum(path.stat().st_size for path in done.folder.glob("*.safetensors"))
    assert 4 * WORDS * columns < size < 4 * WORDS * 1.5 * columns


@torch.inference_mode()
def test_a_traced_program_holds_it_once() -> None:
    model = model_of()
    program = to_pt2._traced(InferenceModel(model))
    large = [name for name, tensor in program.state_dict.items() if tensor.numel() >= 2 * WORDS]
    assert len(large) == 1


@pytest.mark.parametrize("form", ["llama", "gguf"])
@torch.inference_mode()
def test_a_stock_llama_is_tied(form: str, tmp_path: Path) -> None:
    """Whatever its scales are: these become a part of the table and of the last gain."""
    model = stock(also=TIED)
    assert not torch.allclose(model.embedding.write.scale, torch.ones(()))
    done = export(write_run(tmp_path / "run", model), form, tmp_path / "out")
    if form == "llama":
        assert json.loads((done.folder / "config.json").read_text())["tie_word_embeddings"]
        assert "lm_head.weight" not in load_file(done.folder / "model.safetensors")
    else:
        # A name stands after its length.
        assert (
            struct.pack("<Q", 13) + b"output.weight"
            not in (done.folder / "model.gguf").read_bytes()
        )
    again = import_model(done.folder if form == "llama" else done.folder / "model.gguf").eval()
    assert again.initial_spec.tied_head
    # A file holds half precision, but for norms.
    within = 1e-4 if form == "llama" else 0.05
    assert spread_of(model, again(TOKENS), model(TOKENS)) < within


def test_a_model_that_was_trained_and_cut_in_a_stock_shape_is_a_tied_llama(tmp_path: Path) -> None:
    model = stock(also=TIED)
    made = compressor(model, lr=0.01)
    for _ in range(3):
        made.step(lambda: F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()))
    before = len(model.sites)
    spec = cut_to(made, 0.6)
    assert len(spec.sites) < before
    assert spec.tied_head
    done = export(write_run(tmp_path / "run", model), "llama", tmp_path / "out")
    assert done.deviation < 1e-4
    sizes = json.loads((done.folder / "config.json").read_text())
    assert sizes["tie_word_embeddings"]
    parameters = sum(each.numel() for each in load_file(done.folder / "model.safetensors").values())
    # Each write has one more scale here, and the width is filled up for the heads.
    widened = -(-len(spec.sites) // 4) * 4
    assert sizes["hidden_size"] == widened
    assert parameters < sum(each.numel() for each in model.parameters()) * widened / len(spec.sites)


@pytest.mark.parametrize(("scale", "tied"), [(1e-3, True), (0.0, False), (1e-9, False)])
@torch.inference_mode()
def test_a_scale_that_nothing_can_be_divided_by_unties_it(
    scale: float, tied: bool, tmp_path: Path
) -> None:
    """The embedding does not write a site that the head reads: no one table is both."""
    model = stock(also=TIED)
    model.embedding.write.scale[3] = scale
    done = export(write_run(tmp_path / "run", model), "llama", tmp_path / "out")
    assert json.loads((done.folder / "config.json").read_text())["tie_word_embeddings"] == tied
    assert done.deviation < 1e-4


def test_stock_weights_are_finite_and_the_same_function() -> None:
    model = stock(also=TIED)

    class Source:
        spec, run = model.spec(), Path("run")

    Source.model = model  # type: ignore[attr-defined]
    sizes = stock_sizes(Source, "llama")  # type: ignore[arg-type]
    weights = stock_weights(model, sizes, FOLDER, interleaved=False)
    table, norm = weights[FOLDER["table"]], weights[FOLDER["classifier gain"]]
    head = (table * norm)[:, : len(model.sites)]
    expected = model.embedding.table * model.classifier.read.gain
    ratio = head / expected.detach()
    assert float(ratio.max() / ratio.min()) == pytest.approx(1, rel=1e-5)
