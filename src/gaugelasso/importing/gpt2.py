"""GPT-2 models: LayerNorm, biases, learned positions, and a GELU between the maps of an MLP.

`layer_norm` says how a LayerNorm is represented. The bias of the keys has no effect and has no
place: it adds the same to all scores of a query, which the softmax cancels.

Refused by name: attention that is not scaled by the width of its heads alone, cross-attention,
pruned heads, activations other than GELU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.importing.layer_norm import (
    LayerNorm,
    Maps,
    Trunk,
    activation_of,
    fill_attention_,
    fill_mlp_,
    width_and_heads,
    write_centred_,
)
from gaugelasso.importing.pretrained import unfilled
from gaugelasso.importing.source import MASKS, Settings, Source
from gaugelasso.importing.tensors import check_tensors, check_tied
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.models.gelu import GeluMlp
from gaugelasso.models.operators import Attention
from gaugelasso.models.tied import TiedClassifier

HEAD = "lm_head.weight"
_REQUIRED: tuple[tuple[str, Any, str], ...] = (
    ("scale_attn_weights", True, "attention without a scale"),
    ("scale_attn_by_inverse_layer_idx", False, "attention scaled by the number of the layer"),
    ("add_cross_attention", False, "cross-attention"),
    ("pruned_heads", {}, "a model with pruned heads"),
)
# A mask adds at most this to scores that are not seen.
_MASKED = -1e4


@dataclass(frozen=True, kw_only=True)
class Sizes(Trunk):
    """What settings say of a model."""

    vocabulary: int
    length: int

    def shapes(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """The tensors beside the layers, and those of a layer: inputs, outputs."""
        d, f = self.width, self.d_f
        ends = {
            "wte.weight": (self.vocabulary, d),
            "wpe.weight": (self.length, d),
            "ln_f.weight": (d,),
            "ln_f.bias": (d,),
        }
        layer: dict[str, tuple[int, ...]] = {}
        for norm in ("ln_1", "ln_2"):
            layer |= {f"{norm}.weight": (d,), f"{norm}.bias": (d,)}
        maps = {
            "attn.c_attn": (d, 3 * d),
            "attn.c_proj": (d, d),
            "mlp.c_fc": (d, f),
            "mlp.c_proj": (f, d),
        }
        for name, shape in maps.items():
            layer |= {f"{name}.weight": shape, f"{name}.bias": shape[1:]}
        return ends, layer

    def spec(self) -> TransformerSpec:
        return self.biased(self.length, self.vocabulary, self.vocabulary)


def from_folder(source: Source) -> Transformer:
    """The model of a Hugging Face folder with the architecture GPT2LMHeadModel."""
    sizes = _sizes(source.settings)
    tied = source.settings.switch("tie_word_embeddings", True)
    # The first checkpoints of GPT-2 were saved without the name of the model in the model.
    prefix = "transformer." if "transformer.wte.weight" in source.shapes else ""
    # The shapes first: they bound what is built by what the file really holds.
    _check_tensors(source, sizes, prefix, tied)
    model = unfilled(source, lambda: replace(sizes.spec(), tied_head=tied, tied_mean=tied))
    _fill_(model, source, prefix, tied)
    return model


def _sizes(config: Settings) -> Sizes:
    for key, value, why in _REQUIRED:
        config.require(key, (value,), why)
    width, heads = width_and_heads(config, "n_embd", "n_head")
    return Sizes(
        width=width,
        layers=config.whole("n_layer"),
        heads=heads,
        d_f=config.whole("n_inner", 4 * width),
        vocabulary=config.whole("vocab_size"),
        length=config.whole("n_positions"),
        eps=config.number("layer_norm_epsilon", 1e-5),
        mlp=activation_of(config, "activation_function", "gelu_new"),
    )


def _check_tensors(source: Source, sizes: Sizes, prefix: str, tied: bool) -> None:
    """UserError unless the source has just the tensors that the sizes call for."""
    ends, layer = sizes.shapes()

    def expected() -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ((prefix + name, shape) for name, shape in ends.items())
        if not tied:
            yield HEAD, (sizes.vocabulary, sizes.width)
        for depth in range(sizes.layers):
            yield from ((f"{prefix}h.{depth}.{name}", shape) for name, shape in layer.items())

    masks = [name for name in source.shapes if name.endswith(MASKS)]
    check_tensors(source, expected(), [*masks, HEAD] if tied else masks)
    for name in masks:
        _check_mask(source, name, sizes.length)
    if tied:
        check_tied(source, HEAD, f"{prefix}wte.weight")


def _check_mask(source: Source, name: str, length: int) -> None:
    """UserError unless a mask is causal. Earlier versions of transformers saved it."""
    shape = source.shapes[name]
    if name.endswith(".masked_bias"):
        causal = shape == () and bool(source.read(name) <= _MASKED)
    else:
        causal = shape == (1, 1, length, length)
        if causal:
            mask = source.read(name)[0, 0]
            causal = torch.equal(mask, torch.ones_like(mask).tril())
    if not causal:
        raise UserError(f"{str(source.path)!r}: tensor {name[:100]!r} is not a causal mask")


@torch.no_grad()
def _fill_(model: Transformer, source: Source, prefix: str, tied: bool) -> None:
    def read(name: str) -> Tensor:
        return source.read(name).double()

    def norm(name: str) -> LayerNorm:
        return LayerNorm(read(f"{name}.weight"), read(f"{name}.bias"))

    def maps(name: str) -> Maps:
        return read(f"{name}.weight"), read(f"{name}.bias")

    table = read(f"{prefix}wte.weight")
    write_centred_(model.embedding.table, table)
    assert model.embedding.positions is not None
    write_centred_(model.embedding.positions, read(f"{prefix}wpe.weight"))
    for depth in range(model.initial_spec.layers):
        attention, mlp = (model.operators[f"{kind}_{depth}"] for kind in ("attention", "mlp"))
        assert isinstance(attention, Attention)
        assert isinstance(mlp, GeluMlp)
        layer = f"{prefix}h.{depth}"
        fill_attention_(
            attention,
            norm(f"{layer}.ln_1"),
            maps(f"{layer}.attn.c_attn"),
            maps(f"{layer}.attn.c_proj"),
        )
        fill_mlp_(
            mlp, norm(f"{layer}.ln_2"), maps(f"{layer}.mlp.c_fc"), maps(f"{layer}.mlp.c_proj")
        )
    last = norm(f"{prefix}ln_f")
    head = table if tied else read(HEAD)
    if isinstance(model.classifier, TiedClassifier):
        # The embedding is centred, as LayerNorm centres it, and the head is not.
        assert model.classifier.mean is not None
        model.classifier.mean.copy_(table.mean(1))
    else:
        model.classifier.out.copy_(head.T)
    model.classifier.read.gain.copy_(last.gain)
    assert model.classifier.bias is not None
    model.classifier.bias.copy_(last.bias_after(head.T))
