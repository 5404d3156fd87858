"""Qwen3 models: Llama models with norms of queries and keys, and windows in layers."""

from dataclasses import replace

from gaugelasso.importing import decoder, llama, qwen2
from gaugelasso.importing.source import Settings, Source
from gaugelasso.models import Transformer

# What transformers assumes where a config does not have a key.
_DEFAULTS = {**qwen2.DEFAULTS, "head_dim": 128}
_FOLDER = {
    **decoder.FOLDER,
    "query norm": "model.layers.{}.self_attn.q_norm.weight",
    "key norm": "model.layers.{}.self_attn.k_norm.weight",
}
_GGUF = {
    **decoder.GGUF,
    "query norm": "blk.{}.attn_q_norm.weight",
    "key norm": "blk.{}.attn_k_norm.weight",
}


def from_folder(source: Source) -> Transformer:
    """The model of a Hugging Face folder with the architecture Qwen3ForCausalLM."""
    config = Settings(source.settings.path, {**_DEFAULTS, **source.settings.table})
    sizes = replace(qwen2.folder_sizes(config), qk_norm=True)
    tied = config.switch("tie_word_embeddings", False)
    return decoder.build(source, sizes, _FOLDER, tied=tied, interleaved=False)


def from_gguf(source: Source) -> Transformer:
    """The model of a GGUF file of the architecture qwen3."""
    sizes = replace(llama.gguf_sizes(source, "qwen3"), qk_norm=True)
    tied = _GGUF["head"] not in source.shapes
    return decoder.build(source, sizes, _GGUF, tied=tied, interleaved=False)
