"""Hugging Face folders: the same logits as transformers, and refusals by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso import UserError, import_model
from tests.importing.sources import LLAMA3, THETA, distance, llama, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    llama().save_pretrained(path, max_shard_size="60KB")
    return path


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def change(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


CASES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "ungrouped": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 24},
    "other eps": {"rms_norm_eps": 0.5},
    "RoPE of Llama 3": {"rope_parameters": LLAMA3},
    "linear RoPE": {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
@pytest.mark.parametrize("shard", ["1GB", "60KB"])
def test_logits_are_those_of_transformers(
    settings: dict[str, Any], shard: str, tmp_path: Path
) -> None:
    theirs = llama(**settings)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors").exists() == (shard == "1GB")
    model = import_model(tmp_path)
    with torch.inference_mode():
        assert distance(model(tokens()), theirs(tokens()).logits) < 1e-5


def test_a_base_of_rope_beside_the_parameters_is_read(folder: Path, tmp_path: Path) -> None:
    """Before version 5, transformers wrote `rope_theta`, and null for what is not scaled."""
    old = copy(folder, tmp_path / "old")
    rope = json.loads((old / "config.json").read_text())["rope_parameters"]
    change(old, rope_parameters=None, rope_scaling=None, rope_theta=rope["rope_theta"])
    expected, found = (import_model(path)(tokens()) for path in (folder, old))
    assert torch.equal(found, expected)
    change(old, rope_theta=None)
    assert not torch.equal(import_model(old)(tokens()), expected)


def test_scaled_rope_of_earlier_versions_is_read(tmp_path: Path) -> None:
    """`rope_scaling` has no base, and `type` is its oldest name of the kind."""
    llama(rope_parameters=LLAMA3).save_pretrained(tmp_path)
    expected = import_model(tmp_path)(tokens())
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_type"}
    for kind in ("rope_type", "type"):
        change(
            tmp_path,
            rope_parameters=None,
            rope_theta=THETA,
            rope_scaling={kind: "llama3", **scaling},
        )
        assert torch.equal(import_model(tmp_path)(tokens()), expected)


def test_weights_of_half_precision_become_float32(tmp_path: Path) -> None:
    llama().bfloat16().save_pretrained(tmp_path)
    theirs = type(llama()).from_pretrained(tmp_path, dtype=torch.float32)
    model = import_model(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with torch.inference_mode():
        assert distance(model(tokens()), theirs(tokens()).logits) < 1e-5


REFUSED: dict[str, dict[str, Any]] = {
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "hidden_act": {"hidden_act": "gelu"},
    "sliding_window": {"sliding_window": 8},
    "rope_scaling = ": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    "rope_scaling.factor = 0.5": {"rope_scaling": {"type": "linear", "factor": 0.5}},
    "'rope_scaling.factor' is missing": {"rope_scaling": {"type": "linear"}},
    "rope_parameters = ": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "'rope_parameters.low_freq_factor' is missing": {
        "rope_parameters": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}
    },
    "rope_parameters.high_freq_factor = 1.5: must be above": {
        "rope_parameters": LLAMA3 | {"high_freq_factor": 1.5}
    },
    "rope_parameters.original_max_position_embeddings = 1000": {
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 10**400}
    },
    "RoPE that differs between layers": {"rope_parameters": {"full_attention": LLAMA3}},
    "rope_scaling is set too": {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": LLAMA3,
    },
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "rope_interleaved": {"rope_interleaved": True},
    "auto_map": {"auto_map": {"AutoModel": "code.Model"}},
    "quantization_config": {"quantization_config": {"bits": 4}},
    "Qwen3MoeForCausalLM": {"architectures": ["Qwen3MoeForCausalLM"]},
    "GemmaForCausalLM": {"architectures": ["GemmaForCausalLM"]},
    "architectures": {"architectures": None},
    "num_hidden_layers": {"num_hidden_layers": 2.0},
    "hidden_size": {"hidden_size": True},
    "rms_norm_eps": {"rms_norm_eps": -1},
    "rope_theta": {"rope_theta": 10**400},
    "model.layers.2.": {"num_hidden_layers": 10**15},
    "model.layers.1.": {"num_hidden_layers": 1},
    "model.embed_tokens.weight": {"vocab_size": 10**15},
    "q_proj": {"num_attention_heads": 8},
    "lm_head.weight": {"tie_word_embeddings": True},
    "base of RoPE is 0;": {"rope_parameters": {"rope_theta": 0.0}},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_represented_is_refused_by_name(
    named: str, folder: Path, tmp_path: Path
) -> None:
    changed = copy(folder, tmp_path / "changed")
    change(changed, **REFUSED[named])
    with pytest.raises(UserError, match=named) as refused:
        import_model(changed)
    assert str(changed) in str(refused.value)


def test_a_window_as_long_as_the_context_is_no_window(folder: Path, tmp_path: Path) -> None:
    changed = copy(folder, tmp_path / "changed")
    change(changed, sliding_window=40)
    import_model(changed)


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    llama(attention_bias=True).save_pretrained(tmp_path)
    change(tmp_path, attention_bias=False)
    with pytest.raises(UserError, match=r"self_attn\.k_proj\.bias"):
        import_model(tmp_path)


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    changed = copy(folder, tmp_path / "changed")
    (changed / "model.safetensors").rename(changed / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin'.*pickled"):
        import_model(changed)
    (changed / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        import_model(changed)


def test_a_missing_shard_is_named(sharded: Path, tmp_path: Path) -> None:
    changed = copy(sharded, tmp_path / "changed")
    shard = min(changed.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name}': no such file"):
        import_model(changed)


def test_an_index_must_match_its_shards(sharded: Path, tmp_path: Path) -> None:
    changed = copy(sharded, tmp_path / "changed")
    path = changed / "model.safetensors.index.json"
    places = json.loads(path.read_text())["weight_map"]
    for wrong, named in (
        ({**places, "stranger": max(places.values())}, "stranger"),
        ({k: v for k, v in places.items() if k != "model.norm.weight"}, r"model\.norm\.weight"),
        ({**places, "model.norm.weight": "../model.safetensors"}, r"\.\./model"),
        ({**places, "model.norm.weight": "pytorch_model.bin"}, r"pytorch_model\.bin"),
        ([], "weight_map"),
    ):
        path.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(UserError, match=named):
            import_model(changed)


def test_integers_are_no_weights(folder: Path, tmp_path: Path) -> None:
    changed = copy(folder, tmp_path / "changed")
    path = changed / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(UserError, match="'I32'; only F64, F32"):
        import_model(changed)


def test_no_folder_and_no_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json is missing; for a GGUF"):
        import_model(tmp_path)
    with pytest.raises(UserError, match="nowhere': no such file"):
        import_model(tmp_path / "nowhere")
