"""RoBERTa and DistilBERT: encoders like BERT, with the same outputs as transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gaugelasso import Transformer, UserError, import_model
from gaugelasso.importing.folder import write_imported
from gaugelasso.inference import InferenceModel
from tests.importing.edits import assert_each_has_an_effect, change, rewrite
from tests.importing.sources import bert, distance, distilbert, roberta, tokens

FAMILIES: dict[str, Callable[..., Any]] = {"roberta": roberta, "distilbert": distilbert}
PADDING = 2  # of `roberta`
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "RoBERTa": ("roberta", {}),
    "RoBERTa, untied, one type": (
        "roberta",
        {"tie_word_embeddings": False, "type_vocab_size": 1, "pad_token_id": 0},
    ),
    "DistilBERT": ("distilbert", {}),
    "DistilBERT, untied, tanh": (
        "distilbert",
        {"tie_word_embeddings": False, "activation": "gelu_new"},
    ),
}


def words(padding: int = PADDING) -> Tensor:
    """Without the padding token, which has no position in transformers."""
    found = tokens()
    return torch.where(found == padding, 7, found)


@pytest.mark.parametrize("name", SETTINGS)
def test_logits(name: str, tmp_path: Path) -> None:
    family, settings = SETTINGS[name]
    theirs = FAMILIES[family](**settings)
    theirs.save_pretrained(tmp_path)
    model, inputs = import_model(tmp_path), words(settings.get("pad_token_id", PADDING))
    length = 42 if settings.get("pad_token_id") == 0 else 40
    assert model.spec().length == length
    with torch.inference_mode():
        expected = theirs(inputs).logits
        for found in (model(inputs), InferenceModel(model)(inputs)):
            assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_padded_sequences(family: str, tmp_path: Path) -> None:
    theirs = FAMILIES[family](masked_lm=False)
    theirs.save_pretrained(tmp_path)
    model, inputs = import_model(tmp_path), words()
    with torch.inference_mode():
        expected = theirs(inputs).last_hidden_state
        assert distance(model(inputs), expected) < 1e-5
        mask = (torch.arange(40) < 25).long().expand(3, -1)
        padded = torch.where(mask.bool(), inputs, PADDING)
        masked = theirs(padded, attention_mask=mask).last_hidden_state[:, :25]
        served = InferenceModel(model)(padded, torch.full((3,), 25))[:, :25]
        assert distance(served, masked) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_every_vector_has_an_effect(family: str, tmp_path: Path) -> None:
    """So one that was filled from the wrong tensor, or not at all, would be seen."""
    FAMILIES[family]().save_pretrained(tmp_path)
    model = import_model(tmp_path)
    vectors = [n for n, p in model.named_parameters() if p.ndim == 1 or n.endswith("_bias")]
    assert_each_has_an_effect(model, vectors, words())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_command_compares_with_transformers(family: str, tmp_path: Path) -> None:
    for masked_lm in (True, False):
        source = tmp_path / f"source-{masked_lm}"
        FAMILIES[family](masked_lm=masked_lm).save_pretrained(source)
        written = write_imported(source, tmp_path / f"base-{masked_lm}")
        assert not isinstance(written.difference, str)
        assert written.difference.share < 1e-5


def with_more(tensors: dict[str, Tensor], prefix: str, rows: int) -> dict[str, Tensor]:
    """What files of earlier versions have too: numbers of positions, a pooler."""
    more = {f"{prefix}.embeddings.position_ids": torch.arange(rows)[None]}
    if prefix != "distilbert":
        more[f"{prefix}.pooler.dense.weight"] = torch.zeros(64, 64)
        more[f"{prefix}.pooler.dense.bias"] = torch.zeros(64)
    return tensors | more


@pytest.mark.parametrize(
    ("family", "prefix", "rows"),
    [(roberta, "roberta", 43), (distilbert, "distilbert", 40), (bert, "bert", 40)],
)
def test_files_of_earlier_versions(
    family: Callable[..., Any], prefix: str, rows: int, tmp_path: Path
) -> None:
    theirs = family()
    theirs.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: with_more(tensors, prefix, rows))
    with torch.inference_mode():
        assert distance(import_model(tmp_path)(words()), theirs(words()).logits) < 1e-5
    reversed_ = torch.arange(rows).flip(0)[None]
    name = f"{prefix}.embeddings.position_ids"
    rewrite(tmp_path, lambda tensors: tensors | {name: reversed_})
    with pytest.raises(UserError, match=r"position_ids' does not count positions"):
        import_model(tmp_path)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "is_decoder = True: a decoder": ("roberta", {"is_decoder": True}),
    "hidden_act = 'gelu_new': the head has another GELU": ("roberta", {"hidden_act": "gelu_new"}),
    "pad_token_id = None: positions are counted from it": ("roberta", {"pad_token_id": None}),
    "pad_token_id = 42: .* some of max_position_embeddings = 43": (
        "roberta",
        {"pad_token_id": 42},
    ),
    "'lm_head.bias' has no place": ("roberta", {"architectures": ["RobertaModel"]}),
    "activation = 'relu': only 'gelu'": ("distilbert", {"activation": "relu"}),
    "pruned_heads = ": ("distilbert", {"pruned_heads": {"0": [1]}}),
    "n_heads = 5: must divide dim = 64": ("distilbert", {"n_heads": 5}),
    "'transformer.layer.2.attention.q_lin.weight' is missing": ("distilbert", {"n_layers": 3}),
    "'RobertaForSequenceClassification' cannot be imported": (
        "roberta",
        {"architectures": ["RobertaForSequenceClassification"]},
    ),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_represented_is_refused(named: str, tmp_path: Path) -> None:
    family, keys = REFUSED[named]
    FAMILIES[family]().save_pretrained(tmp_path)
    assert isinstance(import_model(tmp_path), Transformer)
    change(tmp_path, **keys)
    with pytest.raises(UserError, match=named):
        import_model(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_that_differs_is_refused(family: str, tmp_path: Path) -> None:
    FAMILIES[family](tie_word_embeddings=False).save_pretrained(tmp_path)
    change(tmp_path, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"\.weight' is not 'embeddings\.word_embeddings\.weight'"):
        import_model(tmp_path)
