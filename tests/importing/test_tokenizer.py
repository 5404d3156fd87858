"""The tokenizer of a GGUF file, and tokenizers that do not fit."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.files.tokenizer import load_tokenizer
from tests.command import Command, assert_user_error, calling
from tests.importing.bases import tiny_gguf, tokenizer_metadata
from tests.tasks.tokenizers import WORDS, byte_level

TEXT = WORDS + "naïve 日本語 12345 <|end|> it's\tDon't \r\n  x"


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    yield from calling(monkeypatch, capsys)


@pytest.mark.parametrize("split", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_the_tokenizer_of_a_gguf_file_is_written(
    split: str, command: Command, tmp_path: Path
) -> None:
    original = byte_level()
    more = tokenizer_metadata(original, split) | {"tokenizer.chat_template": "{{ messages }}"}
    file, out = tiny_gguf(tmp_path / "m.gguf", more), tmp_path / "base"
    code, said, error = command("import", file, "--out", out)
    assert code == 0, error
    assert "tokenizer: 300 tokens" in said
    found = load_tokenizer(out)
    tokens = found.encode([TEXT])[0]
    assert bytes(found.decode(tokens)).decode() == TEXT
    assert found.inner.decode(tokens, skip_special_tokens=False) == TEXT
    assert original.token_to_id("<|end|>") in tokens
    if split == "gpt-2":
        assert tokens.tolist() == original.encode(TEXT).ids
    if split == "smollm":  # digits stand alone, and the space before them
        assert found.inner.encode("a 12").tokens == ["a", "Ġ", "1", "2"]
    about = json.loads((out / "tokenizer_config.json").read_text())
    assert (about["eos_token"], about["chat_template"]) == ("<|end|>", "{{ messages }}")


def test_a_first_token_is_added_where_the_file_says_so(command: Command, tmp_path: Path) -> None:
    more = tokenizer_metadata(byte_level(), "llama-bpe")
    more |= {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True}
    file, out = tiny_gguf(tmp_path / "m.gguf", more), tmp_path / "base"
    assert command("import", file, "--out", out)[0] == 0
    found = load_tokenizer(out)
    assert found.inner.encode("the").ids == [0, *found.encode(["the"])[0]]


def test_a_tokenizer_of_another_kind_is_left_out(command: Command, tmp_path: Path) -> None:
    for number, (key, value) in enumerate([("pre", "default"), ("model", "llama")]):
        more = tokenizer_metadata(byte_level()) | {f"tokenizer.ggml.{key}": value}
        file, out = tiny_gguf(tmp_path / "m.gguf", more), tmp_path / f"base{number}"
        code, said, _ = command("import", file, "--out", out)
        assert code == 0
        assert f"{value!r}" in said
        assert "is not read; known are gpt2 with gpt-2, smollm" in said
        assert not (out / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("merges", ["a b c"], "its tokenizer is damaged (a merge is not of two tokens)"),
        ("merges", ["a nothing"], "its tokenizer is damaged"),
        ("merges", 3, "tokenizer.ggml.merges = 3: must be an array"),
        ("tokens", ["a", "a"], "a token appears twice, or its type is missing"),
        ("token_type", [1, 1], "a token appears twice, or its type is missing"),
        ("tokens", [1, 2], "its tokenizer is damaged"),
    ],
)
def test_a_damaged_tokenizer_is_refused(
    key: str, value: Any, message: str, command: Command, tmp_path: Path
) -> None:
    more = tokenizer_metadata(byte_level()) | {f"tokenizer.ggml.{key}": value}
    file = tiny_gguf(tmp_path / "m.gguf", more)
    assert_user_error(command("import", file, "--out", tmp_path / "base"), message)
    assert not (tmp_path / "base").exists()


def test_a_tokenizer_that_does_not_fit_is_refused(command: Command, tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "m.gguf", tokenizer_metadata(byte_level()), vocabulary=299)
    answer = command("import", file, "--out", tmp_path / "base")
    assert_user_error(answer, "tokenizer is 299, and the model has the tokens 0 to 298")
    assert not (tmp_path / "base").exists()


def test_without_the_package_the_model_is_imported_alone(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    more = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1],
    }  # fmt: skip
    file, out = tiny_gguf(tmp_path / "m.gguf", more), tmp_path / "base"
    code, said, _ = command("import", file, "--out", out)
    assert code == 0
    assert "tokenizer: a tokenizer needs the package tokenizers: pip install" in said
    assert not (out / "tokenizer.json").exists()
