"""DistilBERT encoders: those of BERT with other names, without token types and pooler.

Refused by name: pruned heads, activations other than GELU.
"""

from gaugelasso.importing import bert, encoder
from gaugelasso.importing.layer_norm import activation_of, width_and_heads
from gaugelasso.importing.source import Settings, Source
from gaugelasso.models import Transformer

_NAMES = encoder.Names(
    layer="transformer.layer.{}",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    mixed="attention.out_lin",
    mixed_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    layer_norm="output_layer_norm",
    head="vocab_transform",
    head_norm="vocab_layer_norm",
    decoder="vocab_projector",
    decoder_bias="vocab_projector.bias",
)
# No setting changes it.
_EPS = 1e-12


def from_folder(source: Source) -> Transformer:
    """The model of a folder with the architecture DistilBertModel or DistilBertForMaskedLM."""
    sizes = _sizes(source.settings, source.architecture == "DistilBertForMaskedLM")
    return encoder.build(bert.renamed(source, "distilbert.", ()), sizes, _NAMES)


def _sizes(config: Settings, masked_lm: bool) -> encoder.Sizes:
    config.require("pruned_heads", ({},), "a model with pruned heads")
    width, heads = width_and_heads(config, "dim", "n_heads")
    return encoder.Sizes(
        width=width,
        layers=config.whole("n_layers"),
        heads=heads,
        d_f=config.whole("hidden_dim"),
        vocabulary=config.whole("vocab_size"),
        length=config.whole("max_position_embeddings"),
        types=0,
        eps=_EPS,
        mlp=activation_of(config, "activation", "gelu"),
        masked_lm=masked_lm,
        tied=config.switch("tie_word_embeddings", True),
    )
