"""Qwen2 models: Llama models with biases of queries, keys and values, and windows in layers."""

from dataclasses import replace
from typing import Any

from gaugelasso.importing import decoder, llama, windows
from gaugelasso.importing.decoder import Sizes
from gaugelasso.importing.source import Settings, Source
from gaugelasso.models import Transformer

# What transformers assumes where a config does not have a key.
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def from_folder(source: Source) -> Transformer:
    """The model of a Hugging Face folder with the architecture Qwen2ForCausalLM."""
    config = Settings(source.settings.path, {**DEFAULTS, **source.settings.table})
    # The biases of this family are no setting.
    config.require("attention_bias", (True,), "attention without biases")
    plain = Settings(config.path, {**config.table, "attention_bias": None})
    sizes = replace(folder_sizes(plain), bias=True)
    names = decoder.with_biases(decoder.FOLDER)
    tied = config.switch("tie_word_embeddings", False)
    return decoder.build(source, sizes, names, tied=tied, interleaved=False)


def from_gguf(source: Source) -> Transformer:
    """The model of a GGUF file of the architecture qwen2."""
    sizes = replace(llama.gguf_sizes(source, "qwen2"), bias=True)
    names = decoder.with_biases(decoder.GGUF)
    tied = names["head"] not in source.shapes
    return decoder.build(source, sizes, names, tied=tied, interleaved=False)


def folder_sizes(config: Settings) -> Sizes:
    """As those of a Llama, and the windows; UserError names what cannot be represented."""
    plain = Settings(config.path, {**config.table, "sliding_window": None})
    return replace(llama.folder_sizes(plain), windows=windows.of_some_layers(config))
