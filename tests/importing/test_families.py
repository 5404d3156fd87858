"""Families beside Llama: the same logits as transformers, in training and when exported."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugelasso import UserError, import_model
from gaugelasso.export import export
from gaugelasso.importing.folder import write_imported
from gaugelasso.inference import InferenceModel, load
from tests.importing.sources import LLAMA3, distance, llama, mistral, tokens


def change(folder: Path, *removed: str, **keys: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in removed}))


SERVED = {
    "RoPE of Llama 3": lambda: llama(rope_parameters=LLAMA3),
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
