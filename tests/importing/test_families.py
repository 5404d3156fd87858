"""Families beside Llama: the same logits as transformers, in training and when exported."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso import UserError, import_model
from gaugelasso.axes import named_tensors, width
from gaugelasso.compress.drop import cascade
from gaugelasso.compress.surgery import cut_
from gaugelasso.export import export
from gaugelasso.importing.folder import write_imported
from gaugelasso.inference import InferenceModel, load
from gaugelasso.models.operators import Attention
from tests.importing.sources import (
    LLAMA3,
    distance,
    gguf_tensors,
    gpt2,
    llama,
    metadata,
    mistral,
    qwen2,
    tokens,
    write_gguf,
)


def change(folder: Path, *removed: str, **keys: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in removed}))


SERVED = {
    "RoPE of Llama 3": lambda: llama(rope_parameters=LLAMA3),
    "tied": lambda: llama(tie_word_embeddings=True),
    "Qwen2": qwen2,
    "GPT-2": gpt2,
}


@pytest.mark.parametrize("family", SERVED.values(), ids=SERVED)
def test_exports_have_the_same_logits(
    family: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    theirs, base = family(), tmp_path / "base"
    theirs.save_pretrained(tmp_path / "source")
    write_imported(tmp_path / "source", base)
    served = InferenceModel(import_model(tmp_path / "source"))
    native = load(export(base, "native").folder)
    remote = AutoModelForCausalLM.from_pretrained(export(base, "hf").folder, trust_remote_code=True)
    with torch.inference_mode():
        expected = theirs(tokens()).logits
        cache = served.new_cache(3)
        steps = [served.prefill(tokens()[:, :7], cache)]
        steps += [served.decode(token, cache) for token in tokens()[:, 7:].T]
        assert distance(torch.stack(steps, 1), expected[:, 6:]) < 1e-5
        for found in (served(tokens()), native(tokens()), remote(tokens()).logits):
            assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("window", [None, 40, 4096])
def test_mistral(tied: bool, window: int | None, tmp_path: Path) -> None:
    theirs = mistral(tie_word_embeddings=tied, sliding_window=window, head_dim=24)
    theirs.save_pretrained(tmp_path)
    with torch.inference_mode():
        assert distance(import_model(tmp_path)(tokens()), theirs(tokens()).logits) < 1e-5


def test_a_window_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    mistral(sliding_window=39).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"sliding_window = 39: .*max_position_embeddings = 40"):
        import_model(tmp_path)
    change(tmp_path, max_position_embeddings=39)
    assert import_model(tmp_path).spec().length == 39


def test_a_mistral_config_without_a_window_has_one(tmp_path: Path) -> None:
    mistral(max_position_embeddings=4097).save_pretrained(tmp_path)
    import_model(tmp_path)
    change(tmp_path, "sliding_window")
    with pytest.raises(UserError, match="sliding_window = 4096: "):
        import_model(tmp_path)


def test_mistral_layers_that_differ_are_refused(tmp_path: Path) -> None:
    mistral().save_pretrained(tmp_path)
    change(tmp_path, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(UserError, match="layer_types = "):
        import_model(tmp_path)


QWEN2: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "ungrouped": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1, "rope_parameters": LLAMA3},
    "long window": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "window of no layer": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
}


@pytest.mark.parametrize("settings", QWEN2.values(), ids=QWEN2)
def test_qwen2(settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = qwen2(**settings)
    theirs.save_pretrained(tmp_path)
    model = import_model(tmp_path)
    with torch.inference_mode():
        expected = theirs(tokens()).logits
        assert distance(model(tokens()), expected) < 1e-5
        # A bias that is left out would be seen.
        for name, parameter in model.named_parameters():
            if name.endswith("value_bias"):
                parameter.zero_()
        assert distance(model(tokens()), expected) > 1e-2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [mistral, qwen2])
def test_gguf(family: Callable[..., Any], tied: bool, tmp_path: Path) -> None:
    theirs, path = family(tie_word_embeddings=tied), tmp_path / "m.gguf"
    write_gguf(path, metadata(theirs), gguf_tensors(theirs))
    model = import_model(path)
    assert model.initial_spec.tied_head == tied
    with torch.inference_mode():
        assert distance(model(tokens()), theirs(tokens()).logits) < 1e-5


WINDOW = {"use_sliding_window": True, "sliding_window": 8}
QWEN2_REFUSED: dict[str, dict[str, Any]] = {
    "sliding_window = 8: ": {**WINDOW, "max_window_layers": 1, "layer_types": None},
    "sliding_window = 39: ": {"sliding_window": 39, "layer_types": ["sliding_attention"] * 2},
    "attention_bias = False: ": {"attention_bias": False},
    "hidden_act = 'gelu'": {"hidden_act": "gelu"},
}


@pytest.mark.parametrize("named", QWEN2_REFUSED)
def test_qwen2_that_cannot_be_represented_is_refused(named: str, tmp_path: Path) -> None:
    qwen2().save_pretrained(tmp_path)
    import_model(tmp_path)
    change(tmp_path, **QWEN2_REFUSED[named])
    with pytest.raises(UserError, match=named):
        import_model(tmp_path)


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    theirs, path = qwen2(), tmp_path / "m.gguf"
    tensors = gguf_tensors(theirs)
    del tensors["blk.1.attn_k.bias"]
    write_gguf(path, metadata(theirs), tensors)
    with pytest.raises(UserError, match=r"'blk\.1\.attn_k\.bias' is missing"):
        import_model(path)


def test_biases_are_cut_with_their_maps(tmp_path: Path) -> None:
    qwen2().save_pretrained(tmp_path)
    model = import_model(tmp_path)
    with torch.no_grad():  # one pair, and one channel of the values, that do nothing
        attention = model.operators["attention_0"]
        assert isinstance(attention, Attention)
        for leaf in (attention.query, attention.query_bias, attention.key, attention.key_bias):
            leaf[..., 3] = 0
        for leaf in (attention.value, attention.value_bias):
            leaf[..., 5] = 0
        attention.out[:, 5] = 0
        before = model(tokens())
    table, tensors = model.axis_table(), named_tensors(model)
    keeps = {axis.name: torch.ones(width(axis, tensors), dtype=torch.bool) for axis in table.axes}
    keeps["operators.attention_0.d_k"][3] = False
    keeps["operators.attention_0.d_v"][5] = False
    decision = cascade(table, tensors, keeps)
    assert decision is not None
    cut_(model, table, decision.keeps, decision.removed)
    assert attention.key_bias.shape == (2, 2, 7)
    assert attention.value_bias.shape == (2, 15)
    again = type(model).from_structure(model.structure())
    again.load_state_dict(model.state_dict())
    with torch.inference_mode():
        for found in (model(tokens()), again(tokens()), InferenceModel(model)(tokens())):
            assert distance(found, before) < 1e-5


def test_structures_without_biases_have_no_key_for_them(tmp_path: Path) -> None:
    for family, expected in ((llama, False), (qwen2, True)):
        family().save_pretrained(tmp_path)
        assert ("attention_bias" in import_model(tmp_path).structure()) == expected
