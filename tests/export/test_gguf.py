"""The form for llama.cpp: one file with weights, settings and tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gaugelasso import import_model
from gaugelasso.errors import UserError
from gaugelasso.export import export, to_gguf
from gaugelasso.files.tokenizer import load_tokenizer
from gaugelasso.importing.folder import write_imported
from gaugelasso.importing.gguf import decoded, parse, values
from gaugelasso.importing.gguf_tokenizer import SPLITS, Array, empty
from gaugelasso.inference import InferenceModel
from tests.export.sources import (
    card_example,
    greedy,
    page_examples,
    run_example,
    stock,
    write_run,
)
from tests.importing.bases import tiny_gguf, tokenizer_metadata, write_base
from tests.importing.sources import LLAMA3, distance, gguf_tensors, llama, metadata, qwen2, tokens
from tests.tasks.tokenizers import byte_level, save, with_fallback


def read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, str]]:
    """Metadata with its arrays, tensors, and the types of the tensors."""
    data = np.fromfile(path, np.uint8)
    found, stored = parse(data)
    full = {k: values(data, v) if isinstance(v, Array) else v for k, v in found.items()}
    kinds = {name: each.format.name for name, each in stored.items()}
    return full, {name: decoded(data, each) for name, each in stored.items()}, kinds


def test_the_examples_of_card_and_page_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = export(write_run(Path("runs/stock"), stock()), "gguf")
    assert sorted(path.name for path in done.folder.iterdir()) == ["README.md", "model.gguf"]
    program = card_example(done.folder)
    assert program in page_examples()
    assert run_example(program) == greedy(stock(), [list(b"The ")], 20)[0]


@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_an_imported_model_has_the_settings_and_tensors_of_a_converter(
    tied: bool, tmp_path: Path
) -> None:
    """`gguf_tensors` permutes rows of queries and keys as llama.cpp's converter does."""
    model = llama(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    write_imported(tmp_path / "model", tmp_path / "base")
    folder = export(tmp_path / "base", "gguf", tmp_path / "out").folder
    settings, tensors, kinds = read(folder / "model.gguf")
    expected = {k: v for k, v in metadata(model).items() if k.startswith("llama.")}
    expected["llama.attention.layer_norm_rms_epsilon"] = pytest.approx(3e-4)
    assert {key: settings[key] for key in expected} == expected
    assert settings["general.architecture"] == "llama"
    assert settings["tokenizer.ggml.model"] == "no_vocab"
    theirs = gguf_tensors(model)
    assert tensors.keys() == theirs.keys()
    assert all(np.array_equal(tensors[name].numpy(), theirs[name]) for name in theirs)
    assert set(kinds.values()) == {"F32"}


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "linear", "factor": 3.0}])
@torch.inference_mode()
def test_scaled_rope(scaling: dict[str, Any], tmp_path: Path) -> None:
    model = llama(rope_parameters=scaling)
    model.save_pretrained(tmp_path / "model")
    write_imported(tmp_path / "model", tmp_path / "base")
    folder = export(tmp_path / "base", "gguf", tmp_path / "out").folder
    settings, tensors, _ = read(folder / "model.gguf")
    if scaling is LLAMA3:
        plain = 531.0 ** -(torch.arange(8) / 8)
        expected = plain / model.model.rotary_emb.inv_freq
        assert torch.allclose(tensors["rope_freqs.weight"], expected, rtol=1e-5)
    else:
        assert settings["llama.rope.scaling.factor"] == 3
    found = import_model(folder / "model.gguf").eval()(tokens())
    assert distance(found, model(tokens()).logits) < 1e-5


@torch.inference_mode()
def test_half_precision_keeps_norms_in_float32(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", stock())
    folder = export(run, "gguf", tmp_path / "out", dtype="float16").folder
    settings, _, kinds = read(folder / "model.gguf")
    # 18 sites and 11 filters, padded to a block of llama.cpp.
    assert settings["llama.embedding_length"] == settings["llama.feed_forward_length"] == 32
    assert settings["general.file_type"] == 1
    norms = {name for name in kinds if "norm" in name}
    assert len(norms) == 5
    assert {name for name, kind in kinds.items() if kind == "F32"} == norms
    assert {kinds[name] for name in kinds.keys() - norms} == {"F16"}
    given = torch.arange(24)[None]
    found = import_model(folder / "model.gguf").eval()(given)
    assert 0 < distance(found, InferenceModel(stock())(given)) < 0.01


def test_the_tokenizer_is_in_the_file(tmp_path: Path) -> None:
    base = write_base(tmp_path)
    folder = export(base, "gguf", tmp_path / "out").folder
    settings, *_ = read(folder / "model.gguf")
    wanted = tokenizer_metadata(byte_level())
    assert {key: settings[key] for key in wanted} == wanted
    assert settings["tokenizer.ggml.add_bos_token"] is False
    # The way back: the same tokenizer, now from the file.
    write_imported(folder / "model.gguf", tmp_path / "again")
    text = ["It's a quick fox — 日本語\n"]
    ours, again = load_tokenizer(base), load_tokenizer(tmp_path / "again")
    assert ours.encode(text)[0].tolist() == again.encode(text)[0].tolist()


@pytest.mark.parametrize("split", [name for name in SPLITS if name != "gpt-2"])
def test_ways_of_splitting_are_recognised(split: str, tmp_path: Path) -> None:
    more = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True}
    more |= {"tokenizer.chat_template": "{{ messages }}"}
    file = tiny_gguf(tmp_path / "tiny.gguf", tokenizer_metadata(byte_level(), split) | more)
    write_imported(file, tmp_path / "base")
    folder = export(tmp_path / "base", "gguf", tmp_path / "out").folder
    settings, *_ = read(folder / "model.gguf")
    assert settings["tokenizer.ggml.pre"] == split
    assert {key: settings[key] for key in more} == more


def test_a_vocabulary_larger_than_its_tokenizer_is_filled_up(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", stock(inputs=310, outputs=310), {"name": "tokens"})
    save(byte_level(more=["<own>"]), run / "tokenizer.json")
    folder = export(run, "gguf", tmp_path / "out").folder
    settings, *_ = read(folder / "model.gguf")
    names, types = (settings[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    assert names[300:303] == ["<own>", "[PAD301]", "[PAD302]"]
    assert (types[0], types[1], types[300:]) == (3, 1, [4, *[5] * 9])
    assert len(names) == 310


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", stock(inputs=310, outputs=310), {"name": "tokens"})
    for tokenizer in (with_fallback(), byte_level()):
        if tokenizer.pre_tokenizer:  # a space before a text, which GGUF has no word for
            state = json.loads(tokenizer.to_str())
            state["pre_tokenizer"]["add_prefix_space"] = True
            tokenizer = tokenizer.from_str(json.dumps(state))
        save(tokenizer, run / "tokenizer.json")
        with pytest.raises(UserError, match=r"splits a text as gpt-2, smollm.*is another"):
            export(run, "gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_in_the_file_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_base(tmp_path)

    def without_merges(source: Any) -> dict[str, Any]:
        return tokenizer_metadata(byte_level()) | {"tokenizer.ggml.merges": []}

    monkeypatch.setattr(to_gguf, "tokenizer_metadata", without_merges)
    with pytest.raises(UserError, match="would have another tokenizer, so nothing was written"):
        export(base, "gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_biases_are_refused(tmp_path: Path) -> None:
    qwen2().save_pretrained(tmp_path / "model")
    write_imported(tmp_path / "model", tmp_path / "base")
    with pytest.raises(UserError, match=r"form 'gguf' holds no biases.*choose llama"):
        export(tmp_path / "base", "gguf", tmp_path / "out")


def test_a_file_that_computes_something_else_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of queries and keys in the order of Hugging Face, which llama.cpp would misread."""
    weights = to_gguf.stock_weights
    monkeypatch.setattr(
        to_gguf,
        "stock_weights",
        lambda *given, interleaved: weights(*given, interleaved=not interleaved),
    )
    run = write_run(tmp_path / "run", stock())
    with pytest.raises(UserError, match=r"model\.gguf: its outputs are off by"):
        export(run, "gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_of_bytes(tmp_path: Path) -> None:
    folder = export(write_run(tmp_path / "run", stock()), "gguf", tmp_path / "out").folder
    write_imported(folder / "model.gguf", tmp_path / "base")
    found = load_tokenizer(tmp_path / "base").encode(["été\n 12"])[0]
    assert found.tolist() == [*"été\n 12".encode()]


def test_every_split_has_parts_of_its_own() -> None:
    import tokenizers

    found = {empty(tokenizers, name).to_str() for name in SPLITS}
    assert len(found) == len(SPLITS)


def test_a_text_ends_with_a_token_that_no_text_has(tmp_path: Path) -> None:
    """Where the tokenizer names none, llama.cpp would take token 11, a comma for many."""
    inner = byte_level()
    model = stock(inputs=inner.get_vocab_size(), outputs=inner.get_vocab_size())
    run = write_run(tmp_path / "run", model)
    save(inner, run / "tokenizer.json")
    full, _, _ = read(export(run, "gguf").folder / "model.gguf")
    last = full["tokenizer.ggml.eos_token_id"]
    assert last == inner.token_to_id("\u00ff") == full["tokenizer.ggml.bos_token_id"]
    bytes_alone, _, _ = read(
        export(write_run(tmp_path / "text", stock()), "gguf").folder / "model.gguf"
    )
    assert bytes_alone["tokenizer.ggml.eos_token_id"] == 255
