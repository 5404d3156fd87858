"""Llama models: from the tensors of a Hugging Face folder or of a GGUF file to a `Transformer`.

What the transformer cannot represent is refused by name: biases, a sliding window shorter than the
context, scaled or partial RoPE, norms of queries and keys, experts, other activations. Every
tensor of the source must have a place.

Where the source shares its embedding with its head (`tie_word_embeddings`), the head is a copy of
the embedding here, because the transformer does not share them yet. The outputs are the same, but
the head counts as parameters of its own, and training moves the two apart.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugelasso.errors import UserError, errors_of
from gaugelasso.importing.pretrained import for_pretrained
from gaugelasso.importing.source import Settings, Source
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.models.operators import Attention, SwiGLU
from gaugelasso.runs.structures import check_fits_memory

# What a tensor is -> its name, {} for the number of the layer.
Names = Mapping[str, str]
_FOLDER: Names = {
    "table": "model.embed_tokens.weight",
    "classifier gain": "model.norm.weight",
    "head": "lm_head.weight",
    "attention gain": "model.layers.{}.input_layernorm.weight",
    "query": "model.layers.{}.self_attn.q_proj.weight",
    "key": "model.layers.{}.self_attn.k_proj.weight",
    "value": "model.layers.{}.self_attn.v_proj.weight",
    "out": "model.layers.{}.self_attn.o_proj.weight",
    "mlp gain": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
_GGUF: Names = {
    "table": "token_embd.weight",
    "classifier gain": "output_norm.weight",
    "head": "output.weight",
    "attention gain": "blk.{}.attn_norm.weight",
    "query": "blk.{}.attn_q.weight",
    "key": "blk.{}.attn_k.weight",
    "value": "blk.{}.attn_v.weight",
    "out": "blk.{}.attn_output.weight",
    "mlp gain": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
}
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
        )
    ),
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (1.0,),
    "rope.scale_linear": (1.0,),
    "tensor_data_layout": ("Meta AI original pth",),
}  # fmt: skip


@dataclass(frozen=True)
class _Sizes:
    """What settings say of a Llama model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    d_k: int
    d_f: int
    vocabulary: int
    length: int
    theta: float
    eps: float

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What a tensor is -> the shape that it has in the source: outputs, inputs."""
        d, keys, values = self.width, self.heads * self.d_k, self.kv_heads * self.d_k
        gains = dict.fromkeys(("classifier gain", "attention gain", "mlp gain"), (d,))
        ends = dict.fromkeys(("table", "head"), (self.vocabulary, d))
        maps = {"query": (keys, d), "key": (values, d), "value": (values, d), "out": (d, keys)}
        mlp = {"gate": (self.d_f, d), "up": (self.d_f, d), "down": (d, self.d_f)}
        return {**gains, **ends, **maps, **mlp}

    def spec(self) -> TransformerSpec:
        return TransformerSpec.uniform(
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            d_k=self.d_k,
            d_v=self.d_k,
            d_f=self.d_f,
            length=self.length,
            inputs=self.vocabulary,
            outputs=self.vocabulary,
            rope_base=self.theta,
            eps=self.eps,
        )


def from_folder(source: Source) -> Transformer:
    """The model of a Hugging Face folder with the architecture LlamaForCausalLM."""
    config = source.settings
    config.require("attention_bias", (False,), "biases of attention")
    config.require("mlp_bias", (False,), "biases of the MLP")
    config.require("hidden_act", ("silu",), "an activation other than 'silu'")
    config.require("rope_interleaved", (False,), "interleaved RoPE")
    config.require("partial_rotary_factor", (1,), "RoPE of a part of the channels")
    width, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    length = config.whole("max_position_embeddings", 2048)
    _refuse_short_window(config, "sliding_window", length)
    sizes = _Sizes(
        width=width,
        layers=config.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=config.whole("num_key_value_heads", heads),
        d_k=config.whole("head_dim", max(1, width // heads)),
        d_f=config.whole("intermediate_size"),
        vocabulary=config.whole("vocab_size"),
        length=length,
        theta=_theta(config),
        eps=config.number("rms_norm_eps", 1e-6),
    )
    tied = config.switch("tie_word_embeddings", False)
    return _build(source, sizes, _FOLDER, tied=tied, interleaved=False)


def _theta(config: Settings) -> float:
    """The base of RoPE: a key of its own, or since transformers 5 a key of `rope_parameters`."""
    theta = config.number("rope_theta", 10_000.0)
    for key in ("rope_scaling", "rope_parameters"):
        table = config.table.get(key) or {}
        if not isinstance(table, dict):
            raise config.error(key, "must be a table")
        if table.get("rope_type", table.get("type", "default")) != "default":
            raise config.error(key, "scaled RoPE cannot be imported")
        inner = Settings(config.path, table)
        inner.require("partial_rotary_factor", (1,), f"{key}: RoPE of a part of the channels")
        theta = inner.number("rope_theta", theta)
    return theta


def from_gguf(source: Source) -> Transformer:
    """The model of a GGUF file of the architecture llama."""
    found = source.settings
    table = {
        key.removeprefix("llama."): value
        for key, value in found.table.items()
        if key.startswith("llama.")
    }
    for key, value in table.items():
        allowed = _GGUF_KEYS.get(key, ())
        if allowed is not None and value not in allowed:
            raise found.error(f"llama.{key}", "this cannot be imported")
    width, heads = found.whole("llama.embedding_length"), found.whole("llama.attention.head_count")
    d_k = found.whole("llama.attention.key_length", max(1, width // heads))
    found.require("llama.attention.value_length", (d_k,), f"values that are not {d_k} wide")
    found.require("llama.rope.dimension_count", (d_k,), "RoPE of a part of the channels")
    length = found.whole("llama.context_length")
    _refuse_short_window(found, "llama.attention.sliding_window", length)
    # The rows of the table are the vocabulary; the key for it is often missing.
    rows = source.shapes.get(_GGUF["table"], (0,))[0]
    sizes = _Sizes(
        width=width,
        layers=found.whole("llama.block_count"),
        heads=heads,
        kv_heads=found.whole("llama.attention.head_count_kv", heads),
        d_k=d_k,
        d_f=found.whole("llama.feed_forward_length"),
        vocabulary=found.whole("llama.vocab_size", rows),
        length=length,
        theta=found.number("llama.rope.freq_base", 10_000.0),
        eps=found.number("llama.attention.layer_norm_rms_epsilon"),
    )
    tied = _GGUF["head"] not in source.shapes
    return _build(source, sizes, _GGUF, tied=tied, interleaved=True)


def _refuse_short_window(settings: Settings, key: str, length: int) -> None:
    if settings.whole(key, length) < length:
        raise settings.error(key, f"a window shorter than the context of {length} is not imported")


def _build(
    source: Source, sizes: _Sizes, names: Names, *, tied: bool, interleaved: bool
) -> Transformer:
    # The shapes first: they bound what is built by what the file really holds.
    _check_tensors(source, sizes, names, tied)
    with errors_of(source.settings.path):
        if sizes.theta < 1:
            raise UserError(f"the base of RoPE is {sizes.theta:g}; it must be at least 1")
        spec = for_pretrained(sizes.spec())
    check_fits_memory(spec, source.path)
    model = Transformer(spec)
    read = _reader(source, names)
    with torch.no_grad():
        model.embedding.table.copy_(read("table"))
        model.classifier.read.gain.copy_(read("classifier gain"))
        model.classifier.out.copy_(read("table" if tied else "head").T)
        for depth in range(sizes.layers):
            attention, mlp = (model.operators[f"{kind}_{depth}"] for kind in ("attention", "mlp"))
            assert isinstance(attention, Attention)
            assert isinstance(mlp, SwiGLU)
            heads, groups = sizes.heads, sizes.kv_heads
            attention.read.gain.copy_(read("attention gain", depth))
            attention.query.copy_(_pairs(read("query", depth), heads, interleaved))
            attention.key.copy_(_pairs(read("key", depth), groups, interleaved))
            attention.value.copy_(read("value", depth).T.unflatten(1, (groups, -1)))
            attention.out.copy_(read("out", depth).T.unflatten(0, (heads, -1)))
            mlp.read.gain.copy_(read("mlp gain", depth))
            mlp.gate.copy_(read("gate", depth).T)
            mlp.up.copy_(read("up", depth).T)
            mlp.down.copy_(read("down", depth).T)
    return model


def _reader(source: Source, names: Names) -> Callable[..., Tensor]:
    return lambda what, depth=0: source.read(names[what].format(depth))


def _pairs(rows: Tensor, heads: int, interleaved: bool) -> Tensor:
    """Rows [heads * d_k, D] of a query or key map as [D, heads, 2, P]: the two of each RoPE pair.

    Hugging Face has all first ones of a head, then all second ones, as the transformer here does.
    A GGUF file of this architecture has the two of a pair next to each other.
    """
    if interleaved:
        pairs = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2)
    else:
        pairs = rows.unflatten(0, (heads, 2, -1))
    return pairs.permute(3, 0, 1, 2)


def _check_tensors(source: Source, sizes: _Sizes, names: Names, tied: bool) -> None:
    """UserError unless the source has just the tensors that the sizes call for."""
    shapes, left = sizes.shapes(), set(source.shapes)
    for what, depth in _expected(sizes, names, tied):
        name = names[what].format(depth)
        if name not in source.shapes:
            raise UserError(f"{str(source.path)!r}: tensor {name!r} is missing")
        if source.shapes[name] != shapes[what]:
            raise UserError(
                f"{str(source.path)!r}: tensor {name!r} has the shape {source.shapes[name]}, its "
                f"settings call for {shapes[what]}"
            )
        left.remove(name)
    # Earlier versions of transformers saved a tied head too.
    if tied and names["head"] in left:
        if not torch.equal(source.read(names["head"]), source.read(names["table"])):
            raise UserError(
                f"{str(source.path)!r}: {names['head']!r} is not {names['table']!r}, which the "
                "settings call for"
            )
        left.remove(names["head"])
    for name in sorted(left):
        raise UserError(
            f"{str(source.path)!r}: tensor {name[:100]!r} has no place in the transformer; a Llama "
            "model with biases, norms of queries and keys, or factors of RoPE cannot be imported"
        )


def _expected(sizes: _Sizes, names: Names, tied: bool) -> Iterator[tuple[str, int]]:
    """What each tensor is, and its layer. Lazy: a damaged number of layers may be enormous."""
    yield from ((what, 0) for what in ("table", "classifier gain"))
    if not tied:
        yield "head", 0
    inner = [what for what, name in names.items() if "{}" in name]
    yield from ((what, depth) for depth in range(sizes.layers) for what in inner)
