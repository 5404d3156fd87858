"""The command `import`, and what reads its folder."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gaugelasso import Compressor, CompressorOptions, import_model, load_model
from gaugelasso.importing import comparison
from gaugelasso.importing.folder import write_imported
from gaugelasso.models.operators import SwiGLU
from gaugelasso.runs.checkpoint import load_spec
from tests.command import Command, calling
from tests.importing.sources import (
    bert,
    gguf_tensors,
    gpt2,
    llama,
    metadata,
    roberta,
    tokens,
    write_gguf,
)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    yield from calling(monkeypatch, capsys)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    llama(tie_word_embeddings=True).save_pretrained(path)
    (path / "tokenizer.json").write_text(_words(50).to_str())
    (path / "modeling.py").write_text("raise SystemExit")
    return path


def _words(count: int) -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({f"word{k}": k for k in range(count)}, unk_token="word0"))


def test_a_tokenizer_that_does_not_fit_is_refused(
    command: Command, source: Path, tmp_path: Path
) -> None:
    path = source / "tokenizer.json"
    for content, message in (
        (_words(51).to_str(), "tokenizer is 50, and the model has the tokens 0 to 49"),
        ('{"data": "as it is"}', "not a readable tokenizer"),
    ):
        path.write_text(content)
        code, _, error = command("import", source, "--out", tmp_path / "base")
        assert code == 2
        assert f"{str(path)!r}: " in error
        assert message in error
        assert not (tmp_path / "base").exists()


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M", "gpt2", "models/small"])
def test_names_of_the_hub_are_not_downloaded(
    name: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    owned = name.replace("models/", "OWNER/")  # a folder of one's own is no name of the hub
    hint = f"run hf download {owned} --local-dir models/{name.split('/')[-1]}, and give that folder"
    for arguments in (("import", name), ("compress", name, "--data", "a", "--above-original=3%")):
        code, _, error = command(*arguments, "--out", "out")
        assert code == 2
        assert f"{name!r}: no such file or folder; names of the Hugging Face hub are not" in error
        assert hint in error
    for other in ("models/a/b", "small.gguf", str(tmp_path / "gpt2")):
        code, _, error = command("import", other, "--out", "out")
        assert code == 2
        assert f"{other!r}: no such file or folder" in error
        assert "hf download" not in error
    assert not (tmp_path / "out").exists()


def test_a_folder_is_imported(command: Command, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "base"
    code, said, _ = command("import", source, "--out", out)
    assert code == 0
    model = import_model(source)
    here = sum(parameter.numel() for parameter in model.parameters())
    theirs = sum(parameter.numel() for parameter in llama(tie_word_embeddings=True).parameters())
    assert f"parameters: {here:,} ({theirs:,} in the source; added: scales of writes)" in said
    # A table and a head that are one stay one. Every write has a scale here.
    scales = [p.numel() for name, p in model.named_parameters() if name.endswith("write.scale")]
    assert here == theirs + sum(scales)
    difference = re.search(r"from transformers: (\S+) \((\S+) of", said)
    assert difference
    assert float(difference[2]) < 1e-5
    assert torch.equal(load_model(out)(tokens()), model(tokens()))
    assert load_spec(out) == model.spec()
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert "tokenizer: 50 tokens" in said
    assert not (out / "modeling.py").exists()
    code, info, _ = command("info", out)
    assert code == 0
    # The FMA of a token: all maps once, and attention over the mean of 1 to 40 visible keys.
    matrices = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96) + 64 * 50
    scales = 64 * (2 * 4 + 2)
    fma = matrices + scales + 2 * (2 * 64) * 20.5
    assert f"FMA per token: {fma:,.0f} (mean over a context of 40 tokens)" in said
    assert f"imported from {str(source)!r}, not trained here: {fma:,.0f} FMA" in info


NORMS, HEAD = "means and spreads of norms", "a copy of the table as the head"


@pytest.mark.parametrize(
    ("family", "settings", "changes"),
    [
        (gpt2, {}, "scales of writes, mean and spread of the tied table"),
        (bert, {}, f"scales of writes, {NORMS}, {HEAD}"),
        (bert, {"tie_word_embeddings": False}, f"scales of writes, {NORMS}"),
        (roberta, {"masked_lm": False}, f"scales of writes, {NORMS}, the identity as the head"),
    ],
    ids=["gpt2", "bert", "untied", "headless"],
)
def test_parameters_that_the_source_does_not_have_are_named(
    family: Any, settings: dict[str, bool], changes: str, tmp_path: Path
) -> None:
    family(**settings).save_pretrained(tmp_path / "source")
    found = write_imported(tmp_path / "source", tmp_path / "base")
    assert found.changes == f"added: {changes}; folded: some biases"
    # Little beside a copy of the table, or an identity.
    more = found.parameters - found.source_parameters
    large = 50 * 64 if HEAD in changes else 64 * 64 if "identity" in changes else 0
    assert large - 320 < more < large + 1400


def test_a_gguf_file_is_imported(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = comparison.importlib.util.find_spec
    monkeypatch.setattr(
        comparison.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    model, path, out = llama(), tmp_path / "m.gguf", tmp_path / "base"
    write_gguf(path, metadata(model), gguf_tensors(model), "Q8_0")
    code, said, _ = command("import", path, "--out", out)
    assert code == 0
    assert "logits not compared: gguf is not installed" in said
    assert torch.equal(load_model(out)(tokens()), import_model(path)(tokens()))


def test_nothing_is_overwritten(command: Command, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "base"
    out.mkdir()
    code, _, error = command("import", source, "--out", out)
    assert (code, [*out.iterdir()]) == (2, [])
    assert "already exists" in error


def test_what_is_refused_leaves_nothing(command: Command, source: Path, tmp_path: Path) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "relu"}))
    code, _, error = command("import", source, "--out", tmp_path / "bases" / "one")
    assert code == 2
    assert "hidden_act = 'relu'" in error
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_without_transformers_nothing_is_compared(
    command: Command, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison.importlib.util, "find_spec", lambda name: None)
    code, said, _ = command("import", source, "--out", tmp_path / "base")
    assert code == 0
    assert "logits not compared: transformers is not installed" in said


def test_other_logits_than_those_of_transformers_are_refused(
    command: Command, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = import_model(source)
    with torch.no_grad():
        model.classifier.out[0] += 0.1
    monkeypatch.setattr("gaugelasso.importing.folder.build", lambda _: model)
    code, _, error = command("import", source, "--out", tmp_path / "base")
    assert code == 2
    assert "from those of transformers, so nothing was written" in error
    assert not (tmp_path / "base").exists()


def test_compression_takes_an_imported_model(source: Path) -> None:
    """Filters that do nothing are cut in the first event."""
    model = import_model(source)
    mlp = model.operators["mlp_0"]
    assert isinstance(mlp, SwiGLU)
    with torch.no_grad():
        mlp.up[:, :8], mlp.down[:8] = 0, 0
    compressor = Compressor(model, loss_target=20.0, options=CompressorOptions(interval=1, lr=1e-9))
    loss = F.cross_entropy(model(tokens()).flatten(0, 1), tokens().roll(-1, dims=1).flatten())
    loss.backward()
    compressor.step(loss)
    assert compressor.widths["operators.mlp_0.d_f"] == 96 - 8
