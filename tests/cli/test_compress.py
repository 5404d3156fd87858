"""The command `compress`: from a pretrained model and a text to a smaller model in a folder."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gaugelasso.cli.compression_plan import parse_share
from gaugelasso.config import load_config
from gaugelasso.errors import UserError
from gaugelasso.importing.folder import write_imported
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.tasks import TEST
from gaugelasso.training.evaluation import final_figures
from gaugelasso.training.trainer import Trainer
from tests.command import Command, assert_user_error, calling
from tests.importing.bases import tiny_gguf, tokenizer_metadata
from tests.importing.sources import llama
from tests.tasks.tokenizers import byte_level
from tests.tiny_runs import assert_same_run, contents, read, stop_at

VOCABULARY = 300
OPTIONS = (
    *("--data", "text.txt", "--valid", "valid.txt", "--above-original", "40%", "--out", "out"),
    *("--steps", "40", "--batch", "4", "--length", "16", "--device", "cpu"),
    *("--set", "compress.lr=0.005"),
)


def prose(sentences: int, seed: int) -> str:
    """Sentences of a small grammar: easy to learn, and no two texts are alike."""
    random = np.random.default_rng(seed)
    words = [["The", "A"], ["quick", "lazy", "brown"], ["fox", "dog"], ["jumps", "sleeps"],
             ["over", "in"], ["the house.", "the dogs.", "it."]]  # fmt: skip
    return " ".join(str(random.choice(part)) for _ in range(sentences) for part in words)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, trained for some steps, as a Hugging Face folder; and texts."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer = byte_level(VOCABULARY)
    (folder / "text.txt").write_text(prose(400, 0))
    (folder / "valid.txt").write_text(prose(200, 1))
    model: Any = llama(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48)
    tokens = torch.tensor(tokenizer.encode(prose(400, 2)).ids)
    windows = tokens[: len(tokens) // 16 * 16].view(-1, 16)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(40):
        batch = windows[torch.arange(8) + 8 * step % (len(windows) - 8)]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    model.save_pretrained(folder / "model")
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it all as the working directory."""
    monkeypatch.setenv("GAUGELASSO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    yield from calling(monkeypatch, capsys)


def test_x(place, command):
    import time
    t=time.time()
    answer = command("compress", "model", *OPTIONS)
    print(time.time()-t)
    for a in answer: print(a)
    print((place/"out/config.toml").read_text())
    print((place/"out/original.json").read_text())
    assert 0
