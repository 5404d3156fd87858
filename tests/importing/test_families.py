"""Families beside Llama: the same logits as transformers, in training and when exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso import UserError, import_model
from gaugelasso.axes import named_tensors, width
from gaugelasso.compress.drop import cascade
from gaugelasso.compress.guard import temporarily_zeroed
from gaugelasso.compress.surgery import cut_
from gaugelasso.export import export
from gaugelasso.importing.folder import write_imported
from gaugelasso.inference import InferenceModel, load
from gaugelasso.models import AttentionSpec
from gaugelasso.models.operators import Attention
from tests.importing.edits import change
from tests.importing.sources import (
    LLAMA3,
    distance,
    gguf_tensors,
    gpt2,
    llama,
    metadata,
    mistral,
    qwen2,
    qwen3,
    tokens,
    write_gguf,
)

# Of two layers, the second has a window.
HALF: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
SERVED = {
    "RoPE of Llama 3": lambda: llama(rope_parameters=LLAMA3),
    "tied": lambda: llama(tie_word_embeddings=True),
    "Mistral with a window": lambda: mistral(sliding_window=9),
    "Qwen2": qwen2,
    "Qwen3 with windows": lambda: qwen3(**HALF),
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
@pytest.mark.parametrize("window", [None, 1, 7, 39, 40, 4096])
def test_mistral(tied: bool, window: int | None, tmp_path: Path) -> None:
    theirs = mistral(tie_word_embeddings=tied, sliding_window=window, head_dim=24)
    theirs.save_pretrained(tmp_path)
    model = import_model(tmp_path)
    # A window as long as the context is none.
    kept = {op.window for op in model.spec().operators if isinstance(op, AttentionSpec)}
    assert kept == {window if window and window < 40 else None}
    with torch.inference_mode():
        assert distance(model(tokens()), theirs(tokens()).logits) < 1e-5


def test_a_mistral_config_without_a_window_has_one(tmp_path: Path) -> None:
    mistral(max_position_embeddings=4097).save_pretrained(tmp_path)
    assert "window" not in import_model(tmp_path).structure()["operators"][0]
    change(tmp_path, "sliding_window")
    assert import_model(tmp_path).structure()["operators"][0]["window"] == 4096


def test_mistral_layers_that_differ_are_refused(tmp_path: Path) -> None:
    """transformers has the window in all layers of this family, whatever they are said to be."""
    mistral().save_pretrained(tmp_path)
    for kinds in (["full_attention", "sliding_attention"], ["sliding_attention"] * 2, "sliding"):
        change(tmp_path, layer_types=kinds)
        with pytest.raises(UserError, match="layer_types = "):
            import_model(tmp_path)
    change(tmp_path, layer_types=["full_attention"] * 2)
    import_model(tmp_path)
    change(tmp_path, layer_types=["sliding_attention"] * 2, sliding_window=8)
    import_model(tmp_path)


def test_a_window_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    """It does not say which layers have it."""
    theirs, path = qwen3(), tmp_path / "m.gguf"
    settings = {**metadata(theirs), "qwen3.attention.sliding_window": 39}
    write_gguf(path, settings, gguf_tensors(theirs))
    with pytest.raises(UserError, match=r"sliding_window = 39: .*context_length = 40"):
        import_model(path)


QWEN2: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "ungrouped": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1, "rope_parameters": LLAMA3},
    "long window": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "window of no layer": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "window of one layer": HALF,
    "window of the first": {**HALF, "layer_types": ["sliding_attention", "full_attention"]},
    "window of all layers": {**HALF, "max_window_layers": 0},
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


def test_kinds_of_layers_say_more_than_their_number(tmp_path: Path) -> None:
    qwen2(**HALF).save_pretrained(tmp_path)
    expected = import_model(tmp_path).structure()
    assert [op.get("window") for op in expected["operators"]] == [None, None, 6, None]
    change(tmp_path, max_window_layers=None)
    assert import_model(tmp_path).structure() == expected
    # As earlier versions of transformers wrote it.
    change(tmp_path, "layer_types", max_window_layers=1)
    assert import_model(tmp_path).structure() == expected


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [mistral, qwen2, qwen3])
def test_gguf(family: Callable[..., Any], tied: bool, tmp_path: Path) -> None:
    theirs, path = family(tie_word_embeddings=tied), tmp_path / "m.gguf"
    write_gguf(path, metadata(theirs), gguf_tensors(theirs))
    model = import_model(path)
    assert model.initial_spec.tied_head == tied
    with torch.inference_mode():
        assert distance(model(tokens()), theirs(tokens()).logits) < 1e-5


SLIDING = ["sliding_attention"] * 2
QWEN2_REFUSED: dict[str, dict[str, Any]] = {
    "sliding_window = 0: ": {**HALF, "sliding_window": 0},
    "max_window_layers = -1: ": {**HALF, "max_window_layers": -1, "layer_types": None},
    "max_window_layers = False: ": {**HALF, "max_window_layers": False, "layer_types": None},
    "max_window_layers = 1.5: ": {**HALF, "max_window_layers": 1.5, "layer_types": None},
    "use_sliding_window = 'no': ": {**HALF, "use_sliding_window": "no"},
    "need use_sliding_window": {"sliding_window": 39, "layer_types": SLIDING},
    "the kind of each layer": {**HALF, "layer_types": SLIDING[:1]},
    "layer_types = .*chunked": {"layer_types": ["full_attention", "chunked_attention"]},
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


QWEN3: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "ungrouped": {"num_key_value_heads": 4, "head_dim": 16},
    "one key head": {"num_key_value_heads": 1, "rope_parameters": LLAMA3},
    "default width of heads": {"head_dim": 128},
    "large eps": {"rms_norm_eps": 0.3},
    "window of one layer": HALF,
    "long window": {**HALF, "sliding_window": 40},
}


@pytest.mark.parametrize("settings", QWEN3.values(), ids=QWEN3)
def test_qwen3(settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = qwen3(**settings)
    theirs.save_pretrained(tmp_path)
    if settings.get("head_dim") == 128:
        change(tmp_path, "head_dim")
    model = import_model(tmp_path)
    with torch.inference_mode():
        expected = theirs(tokens()).logits
        assert distance(model(tokens()), expected) < 1e-5
        # A norm that is left out, or that has another eps, would be seen.
        for name, parameter in model.named_parameters():
            if name.endswith("key_norm.channel"):
                parameter.fill_(1)
        assert distance(model(tokens()), expected) > 1e-2


QWEN3_REFUSED: dict[str, dict[str, Any]] = {
    "attention_bias = True: ": {"attention_bias": True},
    "need use_sliding_window": {"sliding_window": 39, "layer_types": SLIDING},
    "q_norm.weight' has the shape": {"head_dim": 12, "num_attention_heads": 8},
    "hidden_act = 'gelu'": {"hidden_act": "gelu"},
}


@pytest.mark.parametrize("named", QWEN3_REFUSED)
def test_qwen3_that_cannot_be_represented_is_refused(named: str, tmp_path: Path) -> None:
    qwen3(num_key_value_heads=4).save_pretrained(tmp_path)
    change(tmp_path, num_key_value_heads=4)
    import_model(tmp_path)
    more = {"num_key_value_heads": 8} if "head_dim" in QWEN3_REFUSED[named] else {}
    change(tmp_path, **QWEN3_REFUSED[named], **more)
    with pytest.raises(UserError, match=named):
        import_model(tmp_path)


def test_norms_of_queries_and_keys_have_no_place_in_a_llama(tmp_path: Path) -> None:
    qwen3().save_pretrained(tmp_path)
    change(tmp_path, architectures=["LlamaForCausalLM"])
    with pytest.raises(UserError, match=r"k_norm\.weight' has no place"):
        import_model(tmp_path)


def test_a_missing_norm_is_named(tmp_path: Path) -> None:
    theirs, path = qwen3(), tmp_path / "m.gguf"
    tensors = gguf_tensors(theirs)
    del tensors["blk.1.attn_q_norm.weight"]
    write_gguf(path, metadata(theirs), tensors)
    with pytest.raises(UserError, match=r"'blk\.1\.attn_q_norm\.weight' is missing"):
        import_model(path)


def test_a_pair_leaves_the_norms_when_it_is_cut(tmp_path: Path) -> None:
    """A pair that does nothing, with the share of the norms that it has after its gain is gone."""
    qwen3(**HALF).save_pretrained(tmp_path)
    model = import_model(tmp_path)
    attention = model.operators["attention_0"]
    assert isinstance(attention, Attention)
    assert attention.query_norm is not None
    assert attention.key_norm is not None
    with torch.no_grad():
        for norm in attention.head_norms().values():
            norm.gain[3] = norm.weight[3] = 0
        before = model(tokens())
    cut_one_pair(model)
    assert attention.query_norm.channel.shape == (2, 11)
    # Of the width before: a narrower head has the same norm.
    assert torch.equal(attention.key_norm.weight, torch.full((11,), 1 / 12))
    again = type(model).from_structure(model.structure())
    again.load_state_dict(model.state_dict())
    with torch.inference_mode():
        for found in (model(tokens()), again(tokens()), InferenceModel(model)(tokens())):
            assert distance(found, before) < 1e-5


def cut_one_pair(model: Any, owner: str = "operators.attention_0") -> None:
    table, tensors = model.axis_table(), named_tensors(model)
    keeps = {axis.name: torch.ones(width(axis, tensors), dtype=torch.bool) for axis in table.axes}
    keeps[f"{owner}.d_k"][3] = False
    decision = cascade(table, tensors, keeps)
    assert decision is not None
    cut_(model, table, decision.keeps, decision.removed)


def test_a_guard_probes_what_the_cut_of_a_pair_does(tmp_path: Path) -> None:
    """Also for a pair whose gains and shares are not zero yet: it leaves both norms."""
    qwen3().save_pretrained(tmp_path)
    model = import_model(tmp_path).eval()
    table, tensors = model.axis_table(), named_tensors(model)
    keeps = {axis.name: torch.ones(width(axis, tensors), dtype=torch.bool) for axis in table.axes}
    keeps["operators.attention_0.d_k"][3] = False
    with torch.inference_mode():
        before = model(tokens())
        with temporarily_zeroed(table, tensors, keeps):
            probed = model(tokens())
        assert torch.equal(model(tokens()), before)
    cut_one_pair(model)
    with torch.inference_mode():
        assert distance(probed, model(tokens())) < 1e-5
        assert distance(probed, before) > 1e-2


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


def test_structures_have_no_key_for_what_a_family_lacks(tmp_path: Path) -> None:
    for family, expected in ((llama, set()), (qwen2, {"attention_bias"}), (qwen3, {"qk_norm"})):
        family().save_pretrained(tmp_path)
        structure = import_model(tmp_path).structure()
        assert structure.keys() & {"attention_bias", "qk_norm"} == expected
        assert not any("window" in operator for operator in structure["operators"])
