"""RoBERTa encoders: those of BERT with other names of the head, and positions from another number.

The position of the first token is one after the number of the padding token. In transformers a
padding token has no position of its own, so sequences must not contain it: give their lengths.

Refused by name: what `bert` refuses, and a head whose GELU is not that of the layers.
"""

from dataclasses import replace

from gaugelasso.importing import bert, encoder
from gaugelasso.importing.source import Source
from gaugelasso.models import Transformer

_NAMES = replace(
    bert.NAMES,
    head="lm_head.dense",
    head_norm="lm_head.layer_norm",
    decoder="lm_head.decoder",
    decoder_bias="lm_head.bias",
)
_POOLER = ("roberta.pooler.dense.weight", "roberta.pooler.dense.bias")


def from_folder(source: Source) -> Transformer:
    """The model of a folder with the architecture RobertaModel or RobertaForMaskedLM."""
    config, masked_lm = source.settings, source.architecture == "RobertaForMaskedLM"
    sizes = bert.sizes_of(config, masked_lm)
    if masked_lm and sizes.mlp != "gelu":
        raise config.error("hidden_act", "the head has another GELU than the layers, an exact one")
    padding = config.table.get("pad_token_id", 1)
    if type(padding) is not int or not 0 <= padding < sizes.length - 1:
        raise config.error(
            "pad_token_id",
            "positions are counted from it, so it must be a whole number that leaves some of "
            f"max_position_embeddings = {sizes.length}",
        )
    first = padding + 1
    sizes = replace(sizes, length=sizes.length - first, skipped=first)
    return encoder.build(bert.renamed(source, "roberta.", _POOLER), sizes, _NAMES, _POOLER)
