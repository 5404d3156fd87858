"""Qwen2 models: Llama models with biases of queries, keys and values.

A sliding window that a layer uses is refused by name, unless it is as long as the context.
"""

from dataclasses import replace
from typing import Any

from gaugelasso.importing import decoder, llama
from gaugelasso.importing.source import Settings, Source
from gaugelasso.models import Transformer

# What transformers assumes where a config does not have a key.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def from_folder(source: Source) -> Transformer:
    """The model of a Hugging Face folder with the architecture Qwen2ForCausalLM."""
    config = Settings(source.settings.path, {**_DEFAULTS, **source.settings.table})
    # The biases of this family are no setting.
    config.require("attention_bias", (True,), "attention without biases")
    window = config.table["sliding_window"] if _has_window(config) else None
    plain = {**config.table, "attention_bias": None, "sliding_window": window}
    sizes = replace(llama.folder_sizes(Settings(config.path, plain)), bias=True)
    names = decoder.with_biases(decoder.FOLDER)
    tied = config.switch("tie_word_embeddings", False)
    return decoder.build(source, sizes, names, tied=tied, interleaved=False)


def from_gguf(source: Source) -> Transformer:
    """The model of a GGUF file of the architecture qwen2."""
    sizes = replace(llama.gguf_sizes(source, "qwen2"), bias=True)
    names = decoder.with_biases(decoder.GGUF)
    tied = names["head"] not in source.shapes
    return decoder.build(source, sizes, names, tied=tied, interleaved=False)


def _has_window(config: Settings) -> bool:
    """Whether a layer has a window: `layer_types` says it, or the number of layers without one."""
    kinds = config.table.get("layer_types")
    if kinds is not None:
        return "sliding_attention" in str(kinds)
    used = config.switch("use_sliding_window", False)
    return used and config.number("max_window_layers") < config.whole("num_hidden_layers")
