"""GGUF files in llama.cpp itself. It has no wheel and is slow to build, so it is no requirement:

pip install llama-cpp-python
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gaugelasso.export import export
from gaugelasso.importing.folder import write_imported
from gaugelasso.importing.gguf import parse
from gaugelasso.inference import InferenceModel
from gaugelasso.runs.checkpoint import load_model
from tests.export.sources import greedy, stock, write_run
from tests.importing.sources import LLAMA3, llama

llama_cpp = pytest.importorskip("llama_cpp")

PROMPT = list(b"The ")


def opened(path: Path) -> Any:
    exact = {"type_k": 0, "type_v": 0}  # the cache in float32; it is in float16 unless set
    return llama_cpp.Llama(
        str(path), n_ctx=24, n_threads=1, logits_all=True, verbose=False, **exact
    )


def continued(model: Any, number: int) -> list[int]:
    """The most likely tokens after the prompt."""
    made = []
    for token in model.generate(PROMPT, temp=0.0, repeat_penalty=1.0):
        made.append(int(token))
        if len(made) == number:
            return made
    return made


@torch.inference_mode()
def logits_agree(path: Path, expected: InferenceModel, share: float) -> None:
    model = opened(path)
    tokens = [int(each) for each in np.random.default_rng(0).integers(1, expected.spec.inputs, 20)]
    model.eval(tokens)
    found = torch.from_numpy(np.array(model.scores[: len(tokens)]))
    wanted = expected(torch.tensor([tokens]))[0]
    assert (found - wanted).abs().max() < share * wanted.std()


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1e-4), ("float16", 2e-2)])
def test_a_cut_stock_model_has_the_same_logits(dtype: str, share: float, tmp_path: Path) -> None:
    done = export(write_run(tmp_path / "run", stock()), "gguf", dtype=dtype)
    logits_agree(done.folder / "model.gguf", InferenceModel(stock().eval()), share)


def test_a_cut_stock_model_continues_a_text_alike(tmp_path: Path) -> None:
    done = export(write_run(tmp_path / "run", stock()), "gguf", dtype="float32")
    model = opened(done.folder / "model.gguf")
    assert model.tokenize(b"The ", add_bos=False) == PROMPT
    assert continued(model, 8) == greedy(stock(), [PROMPT], 8)[0]
    assert model.token_eos() == 255  # no byte of a text


def test_llama_cpp_quantises_a_cut_stock_model(tmp_path: Path) -> None:
    """18 columns and 11 filters: only padded rows have whole blocks."""
    done = export(write_run(tmp_path / "run", stock()), "gguf", dtype="float16")
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    paths = [str(done.folder / name).encode() for name in ("model.gguf", "small.gguf")]
    assert llama_cpp.llama_model_quantize(*paths, settings) == 0
    _, tensors = parse(np.fromfile(done.folder / "small.gguf", np.uint8))
    # The rows of what attention writes are as long as its heads: 24.
    matrices = {n: t.format.name for n, t in tensors.items() if "norm" not in n}
    assert {name for name, kind in matrices.items() if kind == "Q8_0"} == {
        name for name in matrices if "attn_output" not in name
    }
    # Of 8 bits the rounding is this large here; other weights would give several times as much.
    logits_agree(done.folder / "small.gguf", InferenceModel(stock().eval()), 1.0)


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}, {"rope_scaling": LLAMA3}])
def test_an_imported_llama_has_the_same_logits(settings: dict[str, Any], tmp_path: Path) -> None:
    llama(**settings).save_pretrained(tmp_path / "model")
    write_imported(tmp_path / "model", tmp_path / "base")
    done = export(tmp_path / "base", "gguf", tmp_path / "out", dtype="float32")
    expected = load_model(tmp_path / "base")
    logits_agree(done.folder / "model.gguf", InferenceModel(expected.eval()), 1e-4)
