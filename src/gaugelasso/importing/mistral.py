"""Mistral models: Llama models with a sliding window, which may be as long as the context.

A GGUF file of a Mistral model names the architecture llama.
"""

from dataclasses import replace

from gaugelasso.importing import llama
from gaugelasso.importing.source import Settings, Source
from gaugelasso.models import Transformer

# What transformers assumes where a config does not have a key. Null is something else: no window.
_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}


def from_folder(source: Source) -> Transformer:
    """The model of a Hugging Face folder with the architecture MistralForCausalLM."""
    config = source.settings
    if "sliding_attention" in str(config.table.get("layer_types")):
        raise config.error("layer_types", "layers that differ in attention cannot be imported")
    return llama.from_folder(
        replace(source, settings=Settings(config.path, {**_DEFAULTS, **config.table}))
    )
