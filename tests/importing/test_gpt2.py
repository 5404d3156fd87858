"""GPT-2: LayerNorm, biases, GELU and learned positions, with the same logits as transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso import Compressor, CompressorOptions, Transformer, UserError, import_model
from gaugelasso import check as check_model
from gaugelasso.axes import named_tensors
from gaugelasso.config import load_config
from gaugelasso.export import export
from gaugelasso.importing.folder import write_imported
from gaugelasso.inference import InferenceModel, load
from gaugelasso.models import SpecError
from gaugelasso.models.gelu import GeluMlp
from gaugelasso.models.operators import Attention
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.training.trainer import Trainer
from tests.importing.edits import (
    assert_each_has_an_effect,
    assert_outputs,
    change,
    cut_out_,
    rewrite,
)
from tests.importing.sources import distance, gpt2, tokens

SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "exact GELU": {"activation_function": "gelu"},
    "untied": {"tie_word_embeddings": False},
    "four times as many filters": {"n_inner": None, "n_head": 1},
}


@pytest.fixture
def imported(tmp_path: Path) -> Transformer:
    gpt2().save_pretrained(tmp_path)
    return import_model(tmp_path)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_logits(settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = gpt2(**settings)
    theirs.save_pretrained(tmp_path)
    model = import_model(tmp_path)
    with torch.inference_mode():
        expected = theirs(tokens()).logits
        served = InferenceModel(model)
        cache = served.new_cache(3)
        steps = [served.prefill(tokens()[:, :7], cache)]
        steps += [served.decode(token, cache) for token in tokens()[:, 7:].T]
        for found in (model(tokens()), served(tokens())):
            assert distance(found, expected) < 1e-5
        assert distance(torch.stack(steps, 1), expected[:, 6:]) < 1e-5


def test_the_two_forms_of_gelu_are_not_confused(tmp_path: Path) -> None:
    theirs = gpt2(activation_function="gelu")
    theirs.save_pretrained(tmp_path)
    assert import_model(tmp_path).spec().mlp == "gelu"
    for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
        change(tmp_path, activation_function=name)
        model = import_model(tmp_path)
        assert model.spec().mlp == "gelu_tanh"
        with torch.inference_mode():
            assert distance(model(tokens()), theirs(tokens()).logits) > 2e-5


def test_every_bias_has_an_effect(imported: Transformer) -> None:
    biases = [name for name, _ in imported.named_parameters() if name.endswith("bias")]
    assert len(biases) == 2 * (3 + 2) + 1
    assert_each_has_an_effect(imported, biases, tokens())


def test_the_stream_has_mean_zero(imported: Transformer) -> None:
    with torch.inference_mode():
        x = imported.embedding(tokens(), len(imported.sites))
        for operator in imported.operators.values():
            assert float(x.mean(0).abs().max() / x.std()) < 1e-6
            x = operator(x, 3)
        assert float(x.mean(0).abs().max() / x.std()) < 1e-6


def test_a_tied_table_is_one_parameter(imported: Transformer) -> None:
    """The embedding writes rows of mean zero; the head reads their means beside the table."""
    spec = imported.spec()
    assert spec.tied_head
    assert spec.tied_mean
    table = gpt2().transformer.wte.weight.detach()
    head = imported.classifier
    untied = Transformer(replace(spec, tied_head=False, tied_mean=False))
    sizes = [sum(each.numel() for each in model.parameters()) for model in (untied, imported)]
    assert sizes[0] - sizes[1] == table.numel() - sum(table.shape)
    with torch.inference_mode():
        whole = head.out.T + head.mean[:, None] * head.spread
        assert distance(whole, table) < 1e-6
        expected = imported(tokens())
        head.mean.zero_()
        assert distance(imported(tokens()), expected) > 1e-3


def test_half_precision_files(tmp_path: Path) -> None:
    theirs = gpt2().bfloat16()
    theirs.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = theirs.float()(tokens()).logits
        assert distance(import_model(tmp_path)(tokens()), expected) < 1e-5


# --- files of earlier versions of transformers ------------------------------------------------


def with_masks(tensors: dict[str, Tensor], dtype: torch.dtype, length: int = 40) -> dict:
    plain = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    for layer in range(2):
        plain[f"h.{layer}.attn.bias"] = torch.ones(1, 1, length, length, dtype=dtype).tril()
        plain[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
def test_names_without_prefix_and_saved_masks(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = gpt2()
    theirs.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: with_masks(tensors, dtype))
    with torch.inference_mode():
        assert distance(import_model(tmp_path)(tokens()), theirs(tokens()).logits) < 1e-5


def test_another_mask_is_refused(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)

    def window(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = with_masks(tensors, torch.float32)
        found["h.1.attn.bias"] = found["h.1.attn.bias"].triu(-7)
        return found

    rewrite(tmp_path, window)
    with pytest.raises(UserError, match=r"'h\.1\.attn\.bias' is not a causal mask"):
        import_model(tmp_path)


# --- what is refused --------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "scale_attn_by_inverse_layer_idx = True: ": {"scale_attn_by_inverse_layer_idx": True},
    "scale_attn_weights = False: ": {"scale_attn_weights": False},
    "add_cross_attention = True: cross-attention": {"add_cross_attention": True},
    "activation_function = 'relu': only 'gelu'": {"activation_function": "relu"},
    "activation_function = 'quick_gelu'": {"activation_function": "quick_gelu"},
    "activation_function = ": {"activation_function": ["gelu"]},
    "pruned_heads = ": {"pruned_heads": {"0": [1]}},
    "n_head = 5: must divide n_embd = 64": {"n_head": 5},
    "key 'n_layer' is missing": {"n_layer": None},
    "'transformer.h.2.ln_1.weight' is missing": {"n_layer": 3},
    "'transformer.h.1.attn.c_attn.bias' has no place": {"n_layer": 1},
    "'transformer.wpe.weight' has the shape": {"n_positions": 41},
    "the architecture 'GPT2Model' cannot be imported": {"architectures": ["GPT2Model"]},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_represented_is_refused(named: str, tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    import_model(tmp_path)
    change(tmp_path, **REFUSED[named])
    with pytest.raises(UserError, match=named.replace("[", r"\[")):
        import_model(tmp_path)


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    gpt2(tie_word_embeddings=False).save_pretrained(tmp_path)
    change(tmp_path, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"'lm_head\.weight' is not 'transformer\.wte\.weight'"):
        import_model(tmp_path)


# --- training, cuts and files -----------------------------------------------------------------


def small() -> Any:
    """One layer: the tests above and the contract have two, and another would add time alone."""
    return gpt2(n_layer=1, n_embd=16, n_inner=24, n_positions=12, n_head=2)


def next_token_loss(logits: Tensor, inputs: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())


def test_the_declaration_is_right(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    inputs = tokens()[:, :12]
    result = check_model(import_model(tmp_path), (inputs, inputs), next_token_loss, steps=40)
    assert result.passed, str(result)


def test_what_does_nothing_is_cut_exactly(imported: Transformer) -> None:
    attention, mlp = (imported.operators[f"{kind}_0"] for kind in ("attention", "mlp"))
    assert isinstance(attention, Attention)
    assert isinstance(mlp, GeluMlp)
    with torch.no_grad():
        for leaf in (attention.query, attention.query_bias, attention.key):
            leaf[..., 3] = 0
        for leaf in (attention.value, attention.value_bias):
            leaf[..., 5] = 0
        attention.out[:, 5] = 0
        for leaf in (mlp.up[:, 7], mlp.up_bias[7], mlp.down[7]):
            leaf.zero_()
        assert mlp.write.bias is not None
        for leaf in (mlp.down[:, 9], mlp.write.bias[9], mlp.write.scale[9]):
            leaf.zero_()
        before = imported(tokens())
    gone = {"attention_0.d_k": 3, "attention_0.d_v": 5, "mlp_0.d_f": 7, "mlp_0.d_mo": 9}
    cut_out_(imported, {f"operators.{name}": [index] for name, index in gone.items()})
    assert attention.query_bias.shape == (4, 15)
    assert mlp.up_bias.shape == (95,)
    assert mlp.write.bias.shape == (63,)
    assert_outputs(imported, tokens(), before)


def test_pressure_cuts_it_and_the_outputs_follow(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    model = import_model(tmp_path)
    options = CompressorOptions(lr=0.01, interval=10, solver="fixed", rho=5.0)
    compressor = Compressor(model, 1e30, options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(80):
        inputs = torch.randint(50, (4, 12), generator=generator)
        loss = next_token_loss(model(inputs), inputs)
        loss.backward()
        compressor.step(loss)
    assert compressor.fma < 0.8 * compressor.fma_initial
    cut = {name.split(".")[-1] for name, size in compressor.widths.items()
           if size < model_widths(tmp_path)[name]}  # fmt: skip
    assert {"d_f", "d_mo", "d_v"} <= cut
    inputs = tokens()[:, :12]
    with torch.inference_mode():
        expected = model.eval()(inputs)
    assert_outputs(model, inputs, expected)


def model_widths(folder: Path) -> dict[str, int]:
    model = import_model(folder)
    return model.axis_table().widths(named_tensors(model))


def test_other_structures_have_none_of_the_keys(imported: Transformer) -> None:
    keys = {"mlp", "write_bias", "head_bias"}
    structure = imported.structure()
    assert keys <= structure.keys()
    plain = {key: value for key, value in structure.items() if key not in keys}
    older = Transformer.from_structure(plain)
    assert older.structure().keys() == plain.keys()
    assert older.spec().mlp == "swiglu"
    with pytest.raises(SpecError, match="structure: mlp = 'relu' is not"):
        Transformer.from_structure(structure | {"mlp": "relu"})


def test_a_shorter_context_keeps_the_first_positions(imported: Transformer) -> None:
    first = tokens()[:, :9]
    with torch.inference_mode():
        expected = imported(first)
    with pytest.raises(SpecError, match="length = 41: the model has 40 learned positions"):
        imported.set_context_(41)
    imported.set_context_(9)
    imported.axis_table().check(named_tensors(imported))
    with torch.inference_mode():
        assert torch.equal(imported(first), expected)
    assert Transformer.from_structure(imported.structure()).embedding.positions.shape == (9, 64)


def test_the_folder_says_how_far_it_is_from_transformers(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "source")
    written = write_imported(tmp_path / "source", tmp_path / "base")
    assert not isinstance(written.difference, str)
    assert written.difference.share < 1e-5


RUN = """
[task]
name = "tokens"
path = "train.npy"
valid = "valid.npy"
length = 16

[model]
from = "base"

[target]
loss = 1e9
hold = "pressed"

[compress]
lr = 0.05
interval = 5
solver = "fixed"
rho = 5.0
drop_tolerance = 1e9

[train]
steps = 30
warmup = 2
cooldown = 4
batch = 2
eval_every = 10
eval_batches = 1
final_batches = 2
checkpoint_every = 15
device = "cpu"
"""


def test_a_run_with_a_shorter_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAUGELASSO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    gpt2().save_pretrained("source")
    write_imported(Path("source"), Path("base"))
    numbers = np.random.default_rng(0).integers(0, 50, 2000)
    np.save("train.npy", numbers[:1500].astype(np.uint16))
    np.save("valid.npy", numbers[1500:].astype(np.uint16))
    Path("run.toml").write_text(RUN)
    Trainer(load_config(Path("run.toml")), Path("run")).run()
    model = load_model(Path("run"))
    assert isinstance(model, Transformer)
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["fma_final"] < summary["fma_initial"]
    assert model.spec().length == 16
    with torch.inference_mode():
        expected = model.eval()(tokens()[:, :16])
        served = load(export(Path("run"), "native").folder)
        assert distance(served(tokens()[:, :16]), expected) < 1e-5
