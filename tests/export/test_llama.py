"""The form for stock transformers: what loads is a LlamaForCausalLM and computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso import import_model
from gaugelasso.export import export
from gaugelasso.importing.folder import write_imported
from gaugelasso.inference import InferenceModel
from gaugelasso.models import Transformer
from tests.export.sources import (
    card_example,
    greedy,
    page_examples,
    run_example,
    stock,
    write_run,
)
from tests.importing.bases import write_base
from tests.importing.sources import LLAMA3, SIZES, distance, llama, qwen2, tokens


def exported(folder: Path, model: Transformer, **options: Any) -> Path:
    return export(write_run(folder / "run", model), "llama", folder / "llama", **options).folder


def loaded(folder: Path) -> Any:
    """By the class itself, which runs no code of a folder."""
    from transformers import LlamaForCausalLM

    model, about = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(about.values()), about
    return model.eval()


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_the_examples_of_card_and_page_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = export(write_run(Path("runs/stock"), stock()), "llama")
    program = card_example(done.folder)
    assert "trust_remote_code" not in program
    assert program in page_examples()
    assert run_example(program) == greedy(stock(), [list(b"The ")], 20)[0]


@pytest.mark.parametrize("eps", [0.0, 0.03])
@torch.inference_mode()
def test_a_cut_model_is_a_llama_of_smaller_sizes(tmp_path: Path, eps: float) -> None:
    folder = exported(tmp_path, stock(eps=eps))
    assert not list(folder.glob("*.py"))
    sizes = config(folder)
    # 18 sites are no multiple of 4 heads, which transformers wants.
    assert (sizes["hidden_size"], sizes["num_hidden_layers"], sizes["head_dim"]) == (20, 2, 6)
    assert (sizes["rope_theta"], sizes["rope_scaling"]) == (500, None)
    assert not sizes["tie_word_embeddings"]
    given = torch.randint(256, (3, 24), generator=torch.Generator().manual_seed(0))
    expected = InferenceModel(stock(eps=eps))(given)
    assert distance(loaded(folder)(given).logits, expected) < 3e-5
    # What this package reads from the folder, without the rounding of products.
    found, model = import_model(folder).eval().double(), stock(eps=eps).double()
    assert distance(found(given), model(given)) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": True},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
        {"head_dim": 10},
    ],
    ids=["plain", "tied", "llama3", "linear", "head_dim"],
)
@torch.inference_mode()
def test_an_imported_model_is_exported_as_it_was(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = llama(**settings)
    model.save_pretrained(tmp_path / "model")
    write_imported(tmp_path / "model", tmp_path / "base")
    folder = export(tmp_path / "base", "llama", tmp_path / "out").folder
    assert distance(loaded(folder)(tokens()).logits, model(tokens()).logits) < 1e-5
    assert {key: config(folder)[key] for key in SIZES} == {
        key: (SIZES | settings)[key] for key in SIZES
    }
    ours, theirs = loaded(folder).state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@torch.inference_mode()
def test_biases_of_queries_keys_and_values(tmp_path: Path) -> None:
    model = qwen2()
    model.save_pretrained(tmp_path / "model")
    write_imported(tmp_path / "model", tmp_path / "base")
    folder = export(tmp_path / "base", "llama", tmp_path / "out").folder
    assert config(folder)["attention_bias"]
    assert distance(loaded(folder)(tokens()).logits, model(tokens()).logits) < 1e-5


def test_a_table_that_equals_the_head_is_tied(tmp_path: Path) -> None:
    model = stock()
    with torch.no_grad():
        model.classifier.out.copy_((model.embedding.table * model.embedding.write.scale).T)
    folder = exported(tmp_path, model)
    assert config(folder)["tie_word_embeddings"]
    assert "lm_head" not in (folder / "model.safetensors").read_bytes()[:4000].decode("latin-1")


def test_the_tokenizer_is_carried_over(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base = write_base(tmp_path)
    folder = export(base, "llama", tmp_path / "out").folder
    assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert config(folder)["eos_token_id"] == tokenizer.eos_token_id == 0
    assert config(folder)["bos_token_id"] is None


@torch.inference_mode()
def test_half_precision(tmp_path: Path) -> None:
    folder = exported(tmp_path, stock(), dtype="float16")
    assert loaded(folder).dtype == torch.float16
    given = torch.arange(24)[None]
    found = loaded(folder)(given).logits
    assert 0 < distance(found, InferenceModel(stock())(given)) < 0.1
