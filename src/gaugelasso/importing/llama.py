"""Llama models: the settings of a Hugging Face folder or of a GGUF file.

What a Llama does not have, or what the transformer cannot represent, is refused by name: biases, a
sliding window shorter than the context, partial RoPE, RoPE scaled otherwise than by `linear` and
`llama3`, experts, other activations. Families that differ little from Llama read their settings
with these functions.
"""

from collections.abc import Mapping

from gaugelasso.importing import decoder, rope
from gaugelasso.importing.decoder import Sizes
from gaugelasso.importing.source import Settings, Source
from gaugelasso.models import Transformer

# Keys of a GGUF file that change nothing if they have these values. None: read below, or without
# effect on the outputs.
_GGUF_KEYS: Mapping[str, tuple | None] = {
    **dict.fromkeys(
        (
            "block_count", "context_length", "embedding_length", "feed_forward_length",
            "vocab_size", "attention.head_count", "attention.head_count_kv",
            "attention.key_length", "attention.value_length", "rope.dimension_count",
            "rope.freq_base", "attention.layer_norm_rms_epsilon", "attention.sliding_window",
            "rope.scaling.original_context_length", "rope.scaling.finetuned",
            "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
        )
    ),
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
}  # fmt: skip


def from_folder(source: Source) -> Transformer:
    """The model of a Hugging Face folder with the architecture LlamaForCausalLM."""
    sizes = folder_sizes(source.settings)
    tied = source.settings.switch("tie_word_embeddings", False)
    return decoder.build(source, sizes, decoder.FOLDER, tied=tied, interleaved=False)


def from_gguf(source: Source) -> Transformer:
    """The model of a GGUF file of the architecture llama."""
    sizes = gguf_sizes(source, "llama")
    tied = decoder.GGUF["head"] not in source.shapes
    return decoder.build(source, sizes, decoder.GGUF, tied=tied, interleaved=True)


def folder_sizes(config: Settings) -> Sizes:
    """UserError names a setting that cannot be represented."""
    config.require("attention_bias", (False,), "biases of attention")
    config.require("mlp_bias", (False,), "biases of the MLP")
    config.require("hidden_act", ("silu",), "an activation other than 'silu'")
    config.require("rope_interleaved", (False,), "interleaved RoPE")
    config.require("partial_rotary_factor", (1,), "RoPE of a part of the channels")
    width, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    length = config.whole("max_position_embeddings", 2048)
    _refuse_short_window(config, "sliding_window", "max_position_embeddings", length)
    return Sizes(
        width=width,
        layers=config.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=config.whole("num_key_value_heads", heads),
        d_k=config.whole("head_dim", max(1, width // heads)),
        d_f=config.whole("intermediate_size"),
        vocabulary=config.whole("vocab_size"),
        length=length,
        rope=rope.from_config(config),
        eps=config.number("rms_norm_eps", 1e-6),
    )


def gguf_sizes(source: Source, prefix: str) -> Sizes:
    """UserError names a key that cannot be represented; `prefix` is the architecture's."""
    found = source.settings
    for key, value in found.table.items():
        if key.startswith(f"{prefix}."):
            allowed = _GGUF_KEYS.get(key.removeprefix(f"{prefix}."), ())
            if allowed is not None and value not in allowed:
                raise found.error(key, "this cannot be imported")
    heads_key = f"{prefix}.attention.head_count"
    width, heads = found.whole(f"{prefix}.embedding_length"), found.whole(heads_key)
    d_k = found.whole(f"{prefix}.attention.key_length", max(1, width // heads))
    found.require(f"{prefix}.attention.value_length", (d_k,), f"values that are not {d_k} wide")
    found.require(f"{prefix}.rope.dimension_count", (d_k,), "RoPE of a part of the channels")
    length = found.whole(f"{prefix}.context_length")
    window = f"{prefix}.attention.sliding_window"
    _refuse_short_window(found, window, f"{prefix}.context_length", length)
    # The rows of the table are the vocabulary; the key for it is often missing.
    rows = source.shapes.get(decoder.GGUF["table"], (0,))[0]
    return Sizes(
        width=width,
        layers=found.whole(f"{prefix}.block_count"),
        heads=heads,
        kv_heads=found.whole(f"{heads_key}_kv", heads),
        d_k=d_k,
        d_f=found.whole(f"{prefix}.feed_forward_length"),
        vocabulary=found.whole(f"{prefix}.vocab_size", rows),
        length=length,
        rope=rope.from_gguf(source, prefix, d_k // 2),
        eps=found.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
    )


def _refuse_short_window(settings: Settings, key: str, context: str, length: int) -> None:
    window = settings.whole(key, length)
    if window < length:
        raise settings.error(
            key,
            f"a window shorter than the context ({context} = {length}) cannot be imported; up to "
            f"{window} tokens the window has no effect, and a context of {window} can be",
        )
