"""ViT: patches, a class token and LayerNorms, with the same outputs as transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso import UserError, import_model
from gaugelasso import check as check_model
from gaugelasso.export import export
from gaugelasso.importing.folder import write_imported
from gaugelasso.importing.vit import to_patches
from gaugelasso.inference import InferenceModel, load
from tests.importing.edits import change, rewrite
from tests.importing.sources import distance, vit

SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "GELU by tanh": {"hidden_act": "gelu_new"},
    "no biases of queries, keys and values": {"qkv_bias": False},
    "colours": {"num_channels": 3, "patch_size": 6, "num_attention_heads": 1},
}


def images(channels: int = 2) -> Tensor:
    return torch.randn(3, channels, 12, 12, generator=torch.Generator().manual_seed(1))


def test_patches_are_squares_after_an_empty_one() -> None:
    given = images()
    patches = to_patches(given, 4)
    assert patches.shape == (3, 10, 32)
    assert not patches[:, 0].any()
    assert torch.equal(patches[1, 6], given[1, :, 4:8, 8:12].flatten())


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_logits(settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = vit(**settings)
    theirs.save_pretrained(tmp_path)
    model = import_model(tmp_path)
    given = images(theirs.config.num_channels)
    patches = to_patches(given, theirs.config.patch_size)
    with torch.inference_mode():
        expected = theirs(given).logits
        for found in (model(patches), InferenceModel(model)(patches)):
            assert distance(found[:, 0], expected) < 1e-5


def test_hidden_states_of_an_encoder_without_a_head(tmp_path: Path) -> None:
    theirs = vit(classes=None)
    theirs.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = theirs(images()).last_hidden_state
        assert distance(import_model(tmp_path)(to_patches(images(), 4)), expected) < 1e-5


REFUSED: dict[str, dict[str, Any]] = {
    "hidden_act = 'relu': only 'gelu'": {"hidden_act": "relu"},
    "num_attention_heads = 5: must divide hidden_size = 64": {"num_attention_heads": 5},
    "patch_size = 5: must divide image_size = 12": {"patch_size": 5},
    "image_size = .*: must be a whole number": {"image_size": [12, 12]},
    "'vit.embeddings.position_embeddings' has the shape": {"image_size": 16},
    "'vit.encoder.layer.2.attention.attention.query.weight' is missing": {"num_hidden_layers": 3},
    "'vit.encoder.layer.0.attention.attention.key.bias' has no place": {"qkv_bias": False},
    "'embeddings.cls_token' is missing": {"architectures": ["ViTModel"]},
    "'ViTForMaskedImageModeling' cannot be imported": {
        "architectures": ["ViTForMaskedImageModeling"]
    },
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_represented_is_refused(named: str, tmp_path: Path) -> None:
    vit().save_pretrained(tmp_path)
    import_model(tmp_path)
    change(tmp_path, **REFUSED[named])
    with pytest.raises(UserError, match=named):
        import_model(tmp_path)


def test_a_pooler_is_refused(tmp_path: Path) -> None:
    vit(classes=None).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"pooler.dense.weight": torch.zeros(64, 64)})
    with pytest.raises(UserError, match=r"'pooler\.dense\.weight' .*add_pooling_layer=False"):
        import_model(tmp_path)


def class_loss(outputs: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(outputs[:, 0], classes)


def test_the_declaration_is_right(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    vit(num_hidden_layers=1, **sizes).save_pretrained(tmp_path)
    batch = to_patches(images(), 4), torch.tensor([0, 3, 6])
    result = check_model(import_model(tmp_path), batch, class_loss, steps=40)
    assert result.passed, str(result)


@pytest.mark.parametrize("classes", [7, None])
def test_the_folder_and_its_exports(classes: int | None, tmp_path: Path) -> None:
    theirs, base = vit(classes, num_hidden_layers=1), tmp_path / "base"
    theirs.save_pretrained(tmp_path / "source")
    written = write_imported(tmp_path / "source", base)
    assert not isinstance(written.difference, str)
    assert written.difference.share < 1e-5
    with torch.inference_mode():
        served = load(export(base, "native").folder)(to_patches(images(), 4))
        assert distance(served[:, 0] if classes else served, theirs(images())[0]) < 1e-5
    if classes:
        assert export(base, "onnx").deviation < 1e-4
    with pytest.raises(UserError, match="it reads patches, not tokens"):
        export(base, "hf")
