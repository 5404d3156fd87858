"""A model and texts, and the folder of a finished command."""

import contextlib
import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso import cli
from tests.cli.compress.commands import OPTIONS, VOCABULARY, prose, save_trained
from tests.importing.bases import tiny_gguf, tokenizer_metadata
from tests.importing.sources import llama
from tests.tasks.tokenizers import byte_level


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, trained for some steps, as a Hugging Face folder; and texts."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer = byte_level(VOCABULARY)
    (folder / "text.txt").write_text(prose(400, 0))
    (folder / "valid.txt").write_text(prose(60, 1))
    model: Any = llama(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1
    )
    save_trained(model, tokenizer, folder / "model")
    tiny_gguf(folder / "other.gguf", tokenizer_metadata(tokenizer))
    return folder


@pytest.fixture(scope="package")
def done(made: Path) -> str:
    """What the command prints; its folder is in `made`."""
    precision = torch.get_float32_matmul_precision()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        patch.setenv("GAUGELASSO_CACHE", str(made / "cache"))
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
        patch.setattr(sys, "argv", ["gaugelasso", "compress", "model", *OPTIONS])
        patch.chdir(made)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    torch.set_float32_matmul_precision(precision)
    assert stopped.value.code in (None, 0)
    return said.getvalue()


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Model and texts in the working directory."""
    monkeypatch.setenv("GAUGELASSO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(made, tmp_path, ignore=lambda *_: {"out"}, dirs_exist_ok=True)


@pytest.fixture
def out(done: str, made: Path, place: Path) -> Path:
    """The folder of a finished command in the working directory."""
    shutil.copytree(made / "out", place / "out")
    return Path("out")
