"""The form for Hugging Face transformers: the auto class, its cache, padding and the tokenizer."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso.errors import UserError
from gaugelasso.export import export
from gaugelasso.inference import InferenceModel
from gaugelasso.models import Transformer
from tests.export.sources import (
    TEXT,
    card_example,
    greedy,
    page_examples,
    run_example,
    spread_of,
    tiny,
    write_run,
)


@pytest.fixture(scope="module", autouse=True)
def _own_modules(tmp_path_factory: pytest.TempPathFactory) -> None:
    """transformers copies a folder's code to a cache: not to that of the user."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("modules")
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
        patch.syspath_prepend(cache)
        yield


def exported(folder: Path, model: Transformer, task: dict[str, Any] = TEXT, **options: Any) -> Path:
    return export(write_run(folder / "run", model, task), "hf", folder / "hf", **options).folder


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("hf"), tiny())


def test_the_examples_of_card_and_page_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = export(write_run(Path("runs/small"), tiny()), "hf")
    program = card_example(done.folder)
    assert program in page_examples()
    assert run_example(program) == greedy(tiny(), [list(b"The ")], 20)[0]


def test_the_example_asks_nothing_and_warns_of_nothing(folder: Path, tmp_path: Path) -> None:
    """On a terminal, transformers asks whether to run a folder's code, unless told that it may."""
    program = subprocess.Popen(
        [sys.executable, "-c", card_example(folder)],
        stdin=subprocess.PIPE,  # stays open, as a terminal does
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"HF_HOME": str(tmp_path), "COLUMNS": "80"},
    )
    assert program.stdout is not None
    said = program.stdout.read().decode(errors="replace")
    program.communicate()
    assert program.returncode == 0, said
    assert "[y/N]" not in said
    assert "to instantiate a model of type" not in said


@torch.inference_mode()
def test_logits_with_and_without_cache(folder: Path) -> None:
    model = loaded(folder)
    tokens = torch.randint(256, (3, 24), generator=torch.Generator().manual_seed(0))
    expected = InferenceModel(tiny())(tokens)
    assert spread_of(model, model(tokens, use_cache=False).logits, expected) < 1e-4
    first = model(tokens[:, :10])
    second = model(tokens[:, 10:], past_key_values=first.past_key_values)
    both = torch.cat([first.logits, second.logits], dim=1)
    assert spread_of(model, both, expected) < 1e-4
    keys = [layer.keys.shape for layer in second.past_key_values.layers]
    assert len(keys) == 2
    assert all(shape[2] == 24 for shape in keys)
    assert torch.equal(model(tokens, logits_to_keep=1).logits, model(tokens).logits[:, -1:])
    logits, cache = model(tokens, return_dict=False)
    assert torch.equal(logits, model(tokens).logits)
    assert cache.get_seq_length() == 24


def test_generation_is_that_of_this_package(folder: Path) -> None:
    model = loaded(folder)
    prompts = [[5, 99, 3], [200], [1, 2, 3, 4, 5, 6, 7]]
    expected = greedy(tiny(), prompts, 12)
    rows = torch.tensor([[0] * (7 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (7 - len(p)) + [1] * len(p) for p in prompts])
    for cache in (True, False):
        found = model.generate(
            rows, attention_mask=mask, max_new_tokens=12, do_sample=False, use_cache=cache
        )
        assert found[:, 7:].tolist() == expected


def test_labels_give_the_loss_of_the_next_tokens(folder: Path) -> None:
    model = loaded(folder)
    tokens = torch.arange(8)[None]
    labels = tokens.clone()
    labels[0, 3] = -100
    output = model(tokens, labels=labels)
    chances = output.logits[0].log_softmax(-1)
    expected = -torch.stack([chances[i, i + 1] for i in range(7) if i + 1 != 3]).mean()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_text_beyond_the_models_length_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="25 positions are more than the model's 24"):
        loaded(folder)(torch.zeros(1, 25, dtype=torch.long))


def test_the_tokenizer_has_the_bytes(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("The loss ", " a\r\n\tb  ", "été 日本 🎉", "Ā Ġ <0x00> \x00", ""):
        assert tokenizer(text)["input_ids"] == [*text.encode()]
        assert tokenizer.decode([*text.encode()]) == text
    assert tokenizer.decode([65, 255, 66]) == "A\ufffdB"
    batch = tokenizer(["a", "abc"], padding=True)
    assert batch["attention_mask"] == [[0, 0, 1], [1, 1, 1]]


def test_every_file_has_the_same_readers(folder: Path) -> None:
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_the_code_is_self_contained(folder: Path) -> None:
    text = (folder / "modeling_gaugelasso.py").read_text()
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported == {"typing", "torch", "transformers"}


@pytest.mark.parametrize("settings", [{"rope": False}, {"norm": "tied", "positions": False}])
def test_other_structures(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = tiny(inputs=9, outputs=7, **settings)
    folder = exported(tmp_path, model, {"name": "retrieval"})
    assert not (folder / "tokenizer.json").exists()
    assert run_example(card_example(folder)) == greedy(model, [[0, 1, 2, 3]], 20)[0]


def test_a_model_without_attention(tmp_path: Path) -> None:
    model = tiny()
    for name in ("attention_0", "attention_1"):
        model.remove_operator(name)
    folder = exported(tmp_path, model)
    assert run_example(card_example(folder)) == greedy(model, [list(b"The ")], 20)[0]


@torch.inference_mode()
def test_half_precision(tmp_path: Path) -> None:
    folder = exported(tmp_path, tiny(), dtype="bfloat16")
    model, tokens = loaded(folder), torch.arange(24)[None]
    assert model.dtype == torch.bfloat16
    expected = InferenceModel(tiny())(tokens)
    assert 0 < spread_of(model, model(tokens).logits, expected) < 0.5


@torch.inference_mode()
def test_a_token_of_small_values_in_half_precision(tmp_path: Path) -> None:
    """One that training hardly saw: 1 over its level is more than float16 holds."""
    small = tiny(positions=False)
    small.embedding.table[0] *= 5e-6
    model, tokens = loaded(exported(tmp_path, small, dtype="float16")), torch.zeros(1, 2).long()
    expected = InferenceModel(small)(tokens)
    assert spread_of(model, model(tokens).logits, expected) < 0.5


def test_a_precision_that_the_model_does_not_fit_is_refused(tmp_path: Path) -> None:
    large = tiny()
    with torch.no_grad():
        large.embedding.table *= 1e6
    with pytest.raises(UserError, match="in float16 its outputs are not finite numbers"):
        export(write_run(tmp_path / "run", large), "hf", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"input_kind": "masked_patches", "causal": False, "rope": False}, "it reads patches"),
        ({"causal": False}, "every position sees the whole sequence"),
        ({"inputs": 5, "outputs": 7}, "7 outputs for 5 tokens"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    run = write_run(tmp_path / "run", tiny(**settings), {"name": "own"})
    with pytest.raises(UserError, match=f"form 'hf' holds causal language models.*{why}"):
        export(run, "hf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
