"""BERT: LayerNorms in place after each addition, with the same outputs as transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso import Compressor, CompressorOptions, Transformer, UserError, import_model
from gaugelasso import check as check_model
from gaugelasso.axes import named_tensors
from gaugelasso.export import export
from gaugelasso.importing.folder import write_imported, write_model
from gaugelasso.inference import InferenceModel, load
from gaugelasso.models import SpecError, TransformerSpec
from gaugelasso.runs.checkpoint import load_model
from tests.importing.edits import (
    assert_each_has_an_effect,
    assert_outputs,
    change,
    cut_out_,
    rewrite,
)
from tests.importing.sources import bert, distance, tokens

SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "GELU by tanh": {"hidden_act": "gelu_new"},
    "untied": {"tie_word_embeddings": False},
    "one type": {"type_vocab_size": 1, "num_attention_heads": 1},
}


@pytest.fixture
def imported(tmp_path: Path) -> Transformer:
    bert().save_pretrained(tmp_path)
    return import_model(tmp_path)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_logits(settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = bert(**settings)
    theirs.save_pretrained(tmp_path)
    model = import_model(tmp_path)
    with torch.inference_mode():
        expected = theirs(tokens()).logits
        for found in (model(tokens()), InferenceModel(model)(tokens())):
            assert distance(found, expected) < 1e-5


def test_hidden_states_of_an_encoder_without_a_head(tmp_path: Path) -> None:
    theirs = bert(masked_lm=False)
    theirs.save_pretrained(tmp_path)
    model = import_model(tmp_path)
    with torch.inference_mode():
        expected = theirs(tokens()).last_hidden_state
        assert distance(model(tokens()), expected) < 1e-5
        # A shorter sequence, and padding on the right: what transformers has a mask for.
        mask = (torch.arange(40) < 25).long().expand(3, -1)
        masked = theirs(tokens(), attention_mask=mask).last_hidden_state[:, :25]
        served = InferenceModel(model)(tokens(), torch.full((3,), 25))[:, :25]
        for found in (model(tokens()[:, :25]), served):
            assert distance(found, masked) < 1e-5


def test_every_vector_has_an_effect(imported: Transformer) -> None:
    """So a LayerNorm, bias or gain that was left out would be seen."""
    vectors = [n for n, p in imported.named_parameters() if p.ndim == 1 or n.endswith("_bias")]
    assert_each_has_an_effect(imported, vectors, tokens())


def test_files_of_earlier_versions(tmp_path: Path) -> None:
    """Gains as gamma, biases as beta, and the heads of pretraining, which logits do not need."""
    theirs = bert()
    theirs.save_pretrained(tmp_path)

    def earlier(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        found = {}
        for name, tensor in tensors.items():
            for new, old in names.items():
                name = name.replace(new, old)
            found[name] = tensor
        found["bert.pooler.dense.weight"] = torch.zeros(64, 64)
        found["bert.pooler.dense.bias"] = torch.zeros(64)
        found["cls.seq_relationship.weight"] = torch.zeros(2, 64)
        found["cls.seq_relationship.bias"] = torch.zeros(2)
        found["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
        found["cls.predictions.decoder.weight"] = found["cls.predictions.decoder.weight"].clone()
        return found

    rewrite(tmp_path, earlier)
    with torch.inference_mode():
        assert distance(import_model(tmp_path)(tokens()), theirs(tokens()).logits) < 1e-5


# --- what is refused --------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "position_embedding_type = 'relative_key': relative positions": {
        "position_embedding_type": "relative_key"
    },
    "is_decoder = True: a decoder": {"is_decoder": True},
    "add_cross_attention = True: cross-attention": {"add_cross_attention": True},
    "pruned_heads = ": {"pruned_heads": {"0": [1]}},
    "hidden_act = 'relu': only 'gelu'": {"hidden_act": "relu"},
    "num_attention_heads = 5: must divide hidden_size = 64": {"num_attention_heads": 5},
    "key 'intermediate_size' is missing": {"intermediate_size": None},
    "'encoder.layer.2.attention.self.query.weight' is missing": {"num_hidden_layers": 3},
    "'encoder.layer.1.attention.output.LayerNorm.bias' has no place": {"num_hidden_layers": 1},
    "'cls.predictions.bias' has no place": {"architectures": ["BertModel"]},
    "the architecture 'AlbertForMaskedLM' cannot be imported": {
        "architectures": ["AlbertForMaskedLM"]
    },
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_represented_is_refused(named: str, tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    import_model(tmp_path)
    change(tmp_path, **REFUSED[named])
    with pytest.raises(UserError, match=named.replace("[", r"\[")):
        import_model(tmp_path)


def test_a_pooler_is_refused(tmp_path: Path) -> None:
    bert(masked_lm=False).save_pretrained(tmp_path)
    import_model(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"pooler.dense.weight": torch.zeros(64, 64)})
    with pytest.raises(UserError, match=r"'pooler\.dense\.weight' .*add_pooling_layer=False"):
        import_model(tmp_path)


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    bert(tie_word_embeddings=False).save_pretrained(tmp_path)
    change(tmp_path, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"'cls\.predictions\.decoder\.weight' is not"):
        import_model(tmp_path)


def test_structures_that_are_not_built(imported: Transformer) -> None:
    structure = json.loads(json.dumps(imported.structure()))
    assert structure["post_norm"] is True
    assert structure["head_hidden"] == 64
    again = Transformer.from_structure(structure).structure()
    assert json.loads(json.dumps(again)) == structure
    for keys, named in (
        ({"causal": True}, "post_norm = True needs causal = False"),
        ({"norm": "tied"}, "post_norm = True needs norm = 'slow'"),
        ({"head_hidden": -1}, "head_hidden = -1: must be a whole number"),
        ({"mlp": "swiglu"}, "head_hidden needs an mlp with GELU"),
    ):
        with pytest.raises(SpecError, match=named):
            Transformer.from_structure(structure | keys)


# --- training, cuts and files -----------------------------------------------------------------


def small(**settings: Any) -> Any:
    """One layer: the tests above and the contract have two, and another would add time alone."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 12}
    return bert(num_hidden_layers=1, num_attention_heads=2, **sizes, **settings)


def token_loss(logits: Tensor, inputs: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), inputs.flatten())


@pytest.mark.parametrize("masked_lm", [True, False])
def test_the_declaration_is_right(masked_lm: bool, tmp_path: Path) -> None:
    small(masked_lm=masked_lm).save_pretrained(tmp_path)
    inputs = tokens()[:, :12]
    targets = inputs if masked_lm else inputs % 16
    result = check_model(import_model(tmp_path), (inputs, targets), token_loss, steps=40)
    assert result.passed, str(result)


def test_a_site_that_does_nothing_is_cut_exactly(imported: Transformer) -> None:
    """Through all LayerNorms: their means, their levels and their biases."""
    table, tensors = imported.axis_table(), named_tensors(imported)
    gone = {"D": (3, 40), "classifier.d_h": (7,)}
    with torch.no_grad():
        for name, going in gone.items():
            axis = table[name]
            for slot in axis.side_a + axis.side_b:
                leaf = tensors[slot.tensor].movedim(slot.dim, 0)
                links = torch.arange(len(leaf)) if slot.link is None else tensors[slot.link]
                leaf[torch.isin(links, torch.tensor(going))] = 0
        before = imported(tokens())
    cut_out_(imported, gone)
    assert imported.get_parameter("norms.mlp_1.norm.bias").shape == (62,)
    assert imported.classifier.hidden == 63
    assert_outputs(imported, tokens(), before)


WAYS: dict[str, tuple[int, dict[str, Any]]] = {  # steps and options
    "pressure": (70, {"lr": 0.02, "interval": 10, "solver": "fixed", "rho": 1.0}),
    "harm": (40, {"lr": 1e-3, "interval": 1, "removal": "harm"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_training_cuts_it_and_the_outputs_follow(way: str, tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    model = import_model(tmp_path)
    steps, options = WAYS[way]
    compressor = Compressor(model, 1e30, CompressorOptions(**options))
    born, generator = compressor.widths, torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randint(50, (4, 12), generator=generator)
        loss = token_loss(model(inputs), inputs)
        loss.backward()
        compressor.step(loss)
    assert compressor.fma < 0.8 * compressor.fma_initial
    cut = {name.split(".")[-1] for name, size in compressor.widths.items() if size < born[name]}
    assert {"d_v", "d_ao", "d_mi", "d_f", "d_mo"} <= cut
    assert way == "pressure" or {"D", "d_e", "d_ai", "d_c", "d_h"} <= cut
    inputs = tokens()[:, :12]
    with torch.inference_mode():
        expected = model.eval()(inputs)
    assert_outputs(model, inputs, expected)


@pytest.mark.parametrize("masked_lm", [True, False])
def test_the_folder_and_its_exports(masked_lm: bool, tmp_path: Path) -> None:
    # With the GELU by tanh; test_vit.py exports the exact one.
    theirs, base = small(masked_lm=masked_lm, hidden_act="gelu_new"), tmp_path / "base"
    theirs.save_pretrained(tmp_path / "source")
    written = write_imported(tmp_path / "source", base)
    assert not isinstance(written.difference, str)
    assert written.difference.share < 1e-5
    inputs = tokens()[:, :12]
    with torch.inference_mode():
        expected = theirs(inputs)[0]
        for found in (load_model(base).eval(), load(export(base, "native").folder)):
            assert distance(found(inputs), expected) < 1e-5
    exported = export(base, "onnx") if masked_lm else export(base, "native", tmp_path / "again")
    assert exported.deviation < 1e-4
    card = (exported.folder / "README.md").read_text()
    assert "A LayerNorm over all sites follows" in card
    assert ("| classifier | 16 |  |  |  |  | 16 |  |" in card) is masked_lm
    for form in ("hf", "llama", "gguf"):
        with pytest.raises(UserError, match="every position sees the whole sequence"):
            export(base, form)


def test_a_causal_model_with_a_hidden_layer_in_its_head_has_no_hf_form(tmp_path: Path) -> None:
    sizes = {"width": 8, "layers": 1, "heads": 2, "d_k": 4, "d_v": 4, "d_f": 8, "length": 5}
    spec = TransformerSpec.uniform(**sizes, inputs=9, outputs=9)
    model = Transformer(replace(spec, mlp="gelu", head_hidden=6)).eval()
    write_model(model, tmp_path / "base", "here", {})
    with torch.inference_mode():
        inputs = tokens()[:, :5] % 9
        assert distance(InferenceModel(model)(inputs), model(inputs)) < 1e-5
    for form in ("hf", "llama", "gguf"):
        with pytest.raises(UserError, match="its head has a hidden layer"):
            export(tmp_path / "base", form)
