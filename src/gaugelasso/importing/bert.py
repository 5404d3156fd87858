"""BERT encoders: a LayerNorm after each addition to the stream (post-norm), biases, GELU.

Each LayerNorm is a `CentredNorm` in place over all sites, so nothing has to be centred. Type 0 of
the token types is added to the positions: the model reads sequences of one segment. The bias of the
keys has no effect and has no place: it adds the same to all scores of a query, which the softmax
cancels. A BertModel has its last hidden state as outputs, by a head that is the identity.

Refused by name: the pooler of a BertModel, relative positions, decoders and cross-attention, pruned
heads, activations other than GELU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.importing.layer_norm import activation_of, width_and_heads
from gaugelasso.importing.pretrained import unfilled
from gaugelasso.importing.source import Settings, Source
from gaugelasso.importing.tensors import check_tensors, check_tied
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.models.centred_norm import CentredNorm, StreamNorm
from gaugelasso.models.gelu import GeluMlp
from gaugelasso.models.hidden_head import HiddenClassifier
from gaugelasso.models.operators import Attention

Shapes = dict[str, tuple[int, ...]]
_TABLE, _POSITIONS, _TYPES = (
    f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")
)
_HEAD = "cls.predictions"
_DECODER, _DECODER_BIAS = f"{_HEAD}.decoder.weight", f"{_HEAD}.decoder.bias"
_BIAS = f"{_HEAD}.bias"
_TIED = {_DECODER: _TABLE, _DECODER_BIAS: _BIAS}
# Of other heads, which the logits of a masked language model do not depend on.
_OTHER_HEADS = (
    "bert.pooler.dense.weight",
    "bert.pooler.dense.bias",
    "cls.seq_relationship.weight",
    "cls.seq_relationship.bias",
)
_REQUIRED: tuple[tuple[str, Any, str], ...] = (
    ("position_embedding_type", "absolute", "relative positions"),
    ("is_decoder", False, "a decoder"),
    ("add_cross_attention", False, "cross-attention"),
    ("pruned_heads", {}, "a model with pruned heads"),
)


@dataclass(frozen=True)
class Sizes:
    """What settings say of a model; `masked_lm` where it has the head of one."""

    width: int
    layers: int
    heads: int
    d_f: int
    vocabulary: int
    length: int
    types: int
    eps: float
    mlp: Literal["gelu", "gelu_tanh"]
    masked_lm: bool
    # Whether its last map is the table of tokens.
    tied: bool

    def ends(self) -> Shapes:
        """The tensors of the embedding."""
        shapes = {_TABLE: (self.vocabulary, self.width), _POSITIONS: (self.length, self.width)}
        shapes |= {_TYPES: (self.types, self.width)}
        return {**shapes, **self._norm("embeddings.LayerNorm")}

    def layer(self) -> Shapes:
        """The tensors of a layer: outputs, inputs."""
        d, f = self.width, self.d_f
        maps = {f"attention.self.{what}": (d, d) for what in ("query", "key", "value")}
        maps |= {"attention.output.dense": (d, d), "intermediate.dense": (f, d)}
        shapes = _with_biases({**maps, "output.dense": (d, f)})
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= self._norm(name)
        return shapes

    def head(self) -> Shapes:
        """The tensors of the head of a masked language model."""
        shapes = _with_biases({f"{_HEAD}.transform.dense": (self.width, self.width)})
        shapes |= self._norm(f"{_HEAD}.transform.LayerNorm")
        if self.tied:
            return {**shapes, _BIAS: (self.vocabulary,)}
        return {
            **shapes,
            _DECODER: (self.vocabulary, self.width),
            _DECODER_BIAS: (self.vocabulary,),
        }

    def _norm(self, name: str) -> Shapes:
        return {f"{name}.weight": (self.width,), f"{name}.bias": (self.width,)}

    def spec(self) -> TransformerSpec:
        d_k = self.width // self.heads
        spec = TransformerSpec.uniform(
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            d_k=d_k,
            d_v=d_k,
            d_f=self.d_f,
            length=self.length,
            inputs=self.vocabulary,
            outputs=self.vocabulary if self.masked_lm else self.width,
            rope=False,
            causal=False,
            positions=True,
            eps=self.eps,
        )
        return replace(
            spec,
            mlp=self.mlp,
            attention_bias=True,
            write_bias=True,
            post_norm=True,
            head_bias=self.masked_lm,
            head_hidden=self.width if self.masked_lm else 0,
        )


def from_folder(source: Source) -> Transformer:
    """The model of a Hugging Face folder with the architecture BertModel or BertForMaskedLM."""
    sizes = _sizes(source.settings, source.architecture == "BertForMaskedLM")
    source = _renamed(source)
    # The shapes first: they bound what is built by what the file really holds.
    _check_tensors(source, sizes)
    model = unfilled(source, sizes.spec)
    _fill_(model, source, sizes.tied)
    return model


def _sizes(config: Settings, masked_lm: bool) -> Sizes:
    for key, value, why in _REQUIRED:
        config.require(key, (value,), why)
    width, heads = width_and_heads(config, "hidden_size", "num_attention_heads")
    return Sizes(
        width=width,
        layers=config.whole("num_hidden_layers"),
        heads=heads,
        d_f=config.whole("intermediate_size"),
        vocabulary=config.whole("vocab_size"),
        length=config.whole("max_position_embeddings"),
        types=config.whole("type_vocab_size", 2),
        eps=config.number("layer_norm_eps", 1e-12),
        mlp=activation_of(config, "hidden_act", "gelu"),
        masked_lm=masked_lm,
        tied=config.switch("tie_word_embeddings", True),
    )


def _with_biases(maps: Shapes) -> Shapes:
    weights = {f"{name}.weight": shape for name, shape in maps.items()}
    return {**weights, **{f"{name}.bias": shape[:1] for name, shape in maps.items()}}


def _renamed(source: Source) -> Source:
    """The tensors under one set of names.

    A model with a head has its encoder under `bert.`, and the first checkpoints have gains and
    biases of a LayerNorm as `gamma` and `beta`.
    """
    names: dict[str, str] = {}
    for old in source.shapes:
        new = old.removeprefix("bert.") if old not in _OTHER_HEADS else old
        for end, other in ((".LayerNorm.gamma", "weight"), (".LayerNorm.beta", "bias")):
            if new.endswith(end):
                new = f"{new.rpartition('.')[0]}.{other}"
        if new in names:
            raise UserError(f"{str(source.path)!r}: tensor {old[:100]!r} is there twice")
        names[new] = old
    shapes = {new: source.shapes[old] for new, old in names.items()}
    return replace(source, shapes=shapes, read=lambda name: source.read(names[name]))


def _check_tensors(source: Source, sizes: Sizes) -> None:
    """UserError unless the source has just the tensors that the sizes call for."""
    # An untied head has a bias of its own, and the other one has no effect.
    known = (*_TIED, _BIAS, *_OTHER_HEADS) if sizes.masked_lm else ()

    def expected() -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from sizes.ends().items()
        if sizes.masked_lm:
            yield from sizes.head().items()
        layer = sizes.layer()
        for depth in range(sizes.layers):
            yield from ((f"encoder.layer.{depth}.{name}", shape) for name, shape in layer.items())

    hint = (
        "; the pooler of a BertModel cannot be imported: save the model without it "
        "(add_pooling_layer=False)"
    )
    pooled = any(name.startswith("pooler.") for name in source.shapes)
    check_tensors(source, expected(), known, hint if pooled else "")
    if sizes.masked_lm and sizes.tied:
        for name, twin in _TIED.items():
            check_tied(source, name, twin)


@torch.no_grad()
def _fill_(model: Transformer, source: Source, tied: bool) -> None:
    def fill_(leaf: Tensor, name: str) -> None:
        """A map [outputs, inputs] as the transpose in this shape; others as they are."""
        values = source.read(name)
        leaf.copy_((values.T if values.ndim > 1 else values).reshape(leaf.shape))

    def norm_(norm: CentredNorm, name: str) -> None:
        fill_(norm.gain, f"{name}.weight")
        fill_(norm.bias, f"{name}.bias")

    def stream_norm_(place: str, name: str) -> None:
        part = model.norms[place]
        assert isinstance(part, StreamNorm)
        norm_(part.norm, name)

    model.embedding.table.copy_(source.read(_TABLE))
    assert model.embedding.positions is not None
    kinds = source.read(_TYPES).double()
    model.embedding.positions.copy_(source.read(_POSITIONS).double() + kinds[0])
    stream_norm_("embedding", "embeddings.LayerNorm")
    for depth in range(model.initial_spec.layers):
        attention, mlp = (model.operators[f"{kind}_{depth}"] for kind in ("attention", "mlp"))
        assert isinstance(attention, Attention)
        assert isinstance(mlp, GeluMlp)
        assert attention.write.bias is not None
        assert mlp.write.bias is not None
        layer = f"encoder.layer.{depth}"
        inner, out = f"{layer}.attention.self", f"{layer}.attention.output"
        for what in ("query", "key", "value"):
            fill_(getattr(attention, what), f"{inner}.{what}.weight")
        fill_(attention.query_bias, f"{inner}.query.bias")
        fill_(attention.value_bias, f"{inner}.value.bias")
        fill_(attention.out, f"{out}.dense.weight")
        fill_(attention.write.bias, f"{out}.dense.bias")
        stream_norm_(f"attention_{depth}", f"{out}.LayerNorm")
        fill_(mlp.up, f"{layer}.intermediate.dense.weight")
        fill_(mlp.up_bias, f"{layer}.intermediate.dense.bias")
        fill_(mlp.down, f"{layer}.output.dense.weight")
        fill_(mlp.write.bias, f"{layer}.output.dense.bias")
        stream_norm_(f"mlp_{depth}", f"{layer}.output.LayerNorm")
    last = model.classifier
    if not isinstance(last, HiddenClassifier):
        last.out.copy_(torch.eye(len(last.out)))
        return
    fill_(last.up, f"{_HEAD}.transform.dense.weight")
    fill_(last.up_bias, f"{_HEAD}.transform.dense.bias")
    norm_(last.norm, f"{_HEAD}.transform.LayerNorm")
    fill_(last.out, _TABLE if tied else _DECODER)
    assert last.bias is not None
    fill_(last.bias, _BIAS if tied else _DECODER_BIAS)
