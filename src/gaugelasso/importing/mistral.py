"""Mistral models: Llama models with a sliding window in all layers.

A GGUF file of a Mistral model names the architecture llama.
"""

from dataclasses import replace

from gaugelasso.importing import decoder, llama, windows
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
    config = Settings(source.settings.path, {**_DEFAULTS, **source.settings.table})
    window = config.table["sliding_window"]
    kinds = windows.layer_kinds(config)
    # transformers has the window in all layers of this family, whatever this key says.
    if kinds is not None and set(kinds) != {window is not None}:
        raise config.error("layer_types", f"contradicts sliding_window = {window!r}")
    plain = Settings(config.path, {**config.table, "sliding_window": None})
    sizes = replace(llama.folder_sizes(plain), windows=windows.everywhere(config))
    tied = config.switch("tie_word_embeddings", False)
    return decoder.build(source, sizes, decoder.FOLDER, tied=tied, interleaved=False)
