"""BERT encoders; `encoder` says how they are represented.

Refused by name: the pooler of a BertModel, relative positions, decoders and cross-attention, pruned
heads, activations other than GELU.
"""

from dataclasses import replace
from typing import Any

from gaugelasso.errors import UserError
from gaugelasso.importing import encoder
from gaugelasso.importing.layer_norm import activation_of, width_and_heads
from gaugelasso.importing.source import Settings, Source
from gaugelasso.models import Transformer

_HEAD = "cls.predictions"
NAMES = encoder.Names(
    layer="encoder.layer.{}",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    mixed="attention.output.dense",
    mixed_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    layer_norm="output.LayerNorm",
    head=f"{_HEAD}.transform.dense",
    head_norm=f"{_HEAD}.transform.LayerNorm",
    decoder=f"{_HEAD}.decoder",
    decoder_bias=f"{_HEAD}.bias",
)
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


def from_folder(source: Source) -> Transformer:
    """The model of a Hugging Face folder with the architecture BertModel or BertForMaskedLM."""
    sizes = sizes_of(source.settings, source.architecture == "BertForMaskedLM")
    return encoder.build(renamed(source, "bert.", _OTHER_HEADS), sizes, NAMES, _OTHER_HEADS)


def sizes_of(config: Settings, masked_lm: bool) -> encoder.Sizes:
    """What the settings of BERT and RoBERTa say; UserError for what cannot be represented."""
    for key, value, why in _REQUIRED:
        config.require(key, (value,), why)
    width, heads = width_and_heads(config, "hidden_size", "num_attention_heads")
    return encoder.Sizes(
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


def renamed(source: Source, prefix: str, kept: tuple[str, ...]) -> Source:
    """The tensors under one set of names; those in `kept` as they are.

    A model with a head has its encoder under a prefix, and the first checkpoints have gains and
    biases of a LayerNorm as `gamma` and `beta`.
    """
    names: dict[str, str] = {}
    for old in source.shapes:
        new = old.removeprefix(prefix) if old not in kept else old
        for end, other in ((".LayerNorm.gamma", "weight"), (".LayerNorm.beta", "bias")):
            if new.endswith(end):
                new = f"{new.rpartition('.')[0]}.{other}"
        if new in names:
            raise UserError(f"{str(source.path)!r}: tensor {old[:100]!r} is there twice")
        names[new] = old
    shapes = {new: source.shapes[old] for new, old in names.items()}
    return replace(source, shapes=shapes, read=lambda name: source.read(names[name]))
