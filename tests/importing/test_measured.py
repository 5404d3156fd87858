"""What `import` measures: the loss of a text, and GGUF files beside transformers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso import UserError, import_model
from gaugelasso.importing import comparison, open_source
from gaugelasso.importing.comparison import Reference, compare, load_reference
from tests.command import Command
from tests.importing.bases import tiny_gguf, tokenizer_metadata
from tests.importing.sources import (
    LLAMA3,
    bert,
    gguf_tensors,
    gpt2,
    llama,
    metadata,
    mistral,
    qwen2,
    qwen3,
    vit,
    write_gguf,
)
from tests.tasks.tokenizers import WORDS, byte_level, save, word_piece


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 4)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    llama(vocab_size=300).save_pretrained(path)
    save(byte_level(), path / "tokenizer.json")
    return path


def losses(said: str) -> dict[str, list[float]]:
    """Loss and bits of each line with figures."""
    found = re.findall(r"^(\w+): loss (\S+)  bits per \S+(?: \w+)? (\S+)", said, re.MULTILINE)
    return {name: [float(loss), float(bits)] for name, loss, bits in found}


def test_the_loss_of_a_text_is_printed_beside_the_originals(
    gaugelasso: Command, source: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "base"
    code, said, _ = gaugelasso("import", source, "--out", out, "--data", text, "--tokens", 90)
    assert code == 0
    found = losses(said)
    assert found.keys() == {"original", "imported"}
    assert found["imported"] == pytest.approx(found["original"], abs=1e-5)
    assert f"(the first 90 tokens of {str(text)!r} in windows of 40)" in said
    code, again, _ = gaugelasso("eval", out, "--data", text, "--tokens", 90)
    assert code == 0
    assert f"imported: {again}" in said


@pytest.mark.parametrize("family", [gpt2, bert])
def test_other_families_are_measured(
    family: Any, gaugelasso: Command, text: Path, tmp_path: Path
) -> None:
    source, tokenizer = tmp_path / "source", word_piece() if family is bert else byte_level()
    family(vocab_size=300).save_pretrained(source)
    save(tokenizer, source / "tokenizer.json")
    options = ("--data", text, "--length", 16)
    code, said, _ = gaugelasso("import", source, "--out", tmp_path / "base", *options)
    assert code == 0
    found = losses(said)
    assert found["imported"] == pytest.approx(found["original"], abs=1e-4)


def test_without_transformers_the_import_alone_is_measured(
    gaugelasso: Command, source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison.importlib.util, "find_spec", _without("transformers"))
    code, said, _ = gaugelasso("import", source, "--out", tmp_path / "base", "--data", text)
    assert code == 0
    assert "original not measured: transformers is not installed" in said
    assert losses(said).keys() == {"imported"}


def _without(missing: str) -> Any:
    find = comparison.importlib.util.find_spec
    return lambda name: None if name == missing else find(name)


def test_what_cannot_be_measured_is_refused_and_nothing_written(
    gaugelasso: Command, source: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "base"

    def refused(message: str, *options: Any, of: Path = source) -> None:
        code, _, error = gaugelasso("import", of, "--out", out, *options)
        assert code == 2
        assert message in error
        assert not out.exists()

    refused("--data 'none.txt': no such file or folder", "--data", "none.txt")
    refused("--tokens, --length and --device belong to --data", "--tokens", 5)
    refused("--length 41: the model of", "--data", text, "--length", 41)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    refused(str(empty), "--data", empty)
    (source / "tokenizer.json").unlink()
    refused("has no tokenizer, which text needs", "--data", text)
    for name, model, what in (("bert", bert(False), "no head"), ("vit", vit(), "reads images")):
        model.save_pretrained(tmp_path / name)
        refused(what, "--data", text, of=tmp_path / name)


# --- GGUF ------------------------------------------------------------------------------------


def wide_qwen3() -> Any:
    return qwen3(head_dim=128)  # transformers takes no other


@pytest.mark.parametrize("family", [llama, mistral, qwen2, wide_qwen3])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_file_is_compared_with_transformers(family: Any, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model, path = family(), tmp_path / "m.gguf"
    write_gguf(path, metadata(model), gguf_tensors(model), kind)
    source, found = open_source(path), import_model(path)
    reference = load_reference(source)
    assert isinstance(reference, Reference)
    assert compare(source, reference, found).share < 1e-5
    with torch.no_grad():
        found.classifier.out[0] += 0.1
    with pytest.raises(UserError, match="from those of transformers, so nothing was written"):
        compare(source, reference, found)


def test_no_file_beside_a_gguf_file_is_read(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model, path = llama(), tmp_path / "m.gguf"
    write_gguf(path, metadata(model), gguf_tensors(model))
    config = {"model_type": "other", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling.py").write_text("raise SystemExit")
    source = open_source(path)
    reference = load_reference(source)
    assert isinstance(reference, Reference)
    assert compare(source, reference, import_model(path)).share < 1e-5


def test_a_width_that_transformers_does_not_read_is_not_compared(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model, path = qwen3(), tmp_path / "m.gguf"
    write_gguf(path, metadata(model), gguf_tensors(model))
    found = load_reference(open_source(path))
    assert found == "transformers takes 128 for the width of a head, the file has 24"


def test_scaled_rope_of_a_gguf_file_is_not_compared(tmp_path: Path) -> None:
    """Transformers leaves it out, so that the outputs would differ."""
    pytest.importorskip("gguf")
    model, path = llama(rope_parameters=LLAMA3), tmp_path / "m.gguf"
    factors = (531.0 ** -(torch.arange(8) / 8) / model.model.rotary_emb.inv_freq).numpy()
    plain, scaled = metadata(model), gguf_tensors(model) | {"rope_freqs.weight": factors}
    linear = plain | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 3.0}
    for keys, tensors in ((plain, scaled), (linear, gguf_tensors(model))):
        write_gguf(path, keys, tensors)
        reference = load_reference(open_source(path))
        assert reference == "transformers leaves out the scaling of RoPE in a GGUF file"


def test_the_loss_of_a_gguf_file_is_printed(
    gaugelasso: Command, text: Path, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    file = tiny_gguf(tmp_path / "tiny.gguf", tokenizer_metadata(byte_level()))
    code, said, error = gaugelasso("import", file, "--out", tmp_path / "base", "--data", text)
    assert (code, error) == (0, "")
    found = losses(said)
    assert found["imported"] == pytest.approx(found["original"], abs=1e-5)
    assert "largest difference of logits from transformers: " in said
