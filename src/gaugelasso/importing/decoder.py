"""Decoders of other libraries with RoPE, RMSNorm and SwiGLU: from their tensors to a `Transformer`.

A family says which sizes and which names its tensors have. Every tensor of the source must have a
place.

Where the source shares its embedding with its head (`tie_word_embeddings`), the model does too.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gaugelasso.importing.pretrained import unfilled
from gaugelasso.importing.rope import FACTORS, Rope
from gaugelasso.importing.source import Source
from gaugelasso.importing.tensors import check_tensors, check_tied
from gaugelasso.importing.windows import Windows
from gaugelasso.models import Transformer, TransformerSpec
from gaugelasso.models.operator_spec import AttentionSpec
from gaugelasso.models.operators import Attention, SwiGLU

# The maps that may have biases.
BIASED = ("query", "key", "value")
# The maps that may be followed by a norm of each head.
NORMED = ("query", "key")
# What a tensor is -> its name, {} for the number of the layer.
Names = Mapping[str, str]
FOLDER: Names = {
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
GGUF: Names = {
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


def with_biases(names: Names) -> Names:
    """The same names, and those of the biases of queries, keys and values."""
    biases = {f"{what} bias": names[what].replace(".weight", ".bias") for what in BIASED}
    return {**names, **biases}


@dataclass(frozen=True)
class Sizes:
    """What settings say of a model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    d_k: int
    d_f: int
    vocabulary: int
    length: int
    rope: Rope
    eps: float
    # Whether queries, keys and values have biases.
    bias: bool = False
    # Whether queries and keys are normalised in each head.
    qk_norm: bool = False
    # None where every query sees all keys before it.
    windows: Windows | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What a tensor is -> the shape that it has in the source: outputs, inputs."""
        d, keys, values = self.width, self.heads * self.d_k, self.kv_heads * self.d_k
        gains = dict.fromkeys(("classifier gain", "attention gain", "mlp gain"), (d,))
        ends = dict.fromkeys(("table", "head"), (self.vocabulary, d))
        maps = {"query": (keys, d), "key": (values, d), "value": (values, d), "out": (d, keys)}
        mlp = {"gate": (self.d_f, d), "up": (self.d_f, d), "down": (d, self.d_f)}
        biases = {f"{what} bias": maps[what][:1] for what in BIASED} if self.bias else {}
        norms = {f"{what} norm": (self.d_k,) for what in NORMED} if self.qk_norm else {}
        return {**gains, **ends, **maps, **mlp, **biases, **norms}

    def spec(self) -> TransformerSpec:
        spec = TransformerSpec.uniform(
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
            eps=self.eps,
        )
        frequencies = self.rope.frequencies(self.d_k // 2)
        operators = (
            replace(op, frequencies=frequencies, window=self._window(op.depth))
            if isinstance(op, AttentionSpec)
            else op
            for op in spec.operators
        )
        spec = replace(spec, operators=tuple(operators))
        return replace(spec, attention_bias=self.bias, qk_norm=self.qk_norm)

    def _window(self, layer: int) -> int | None:
        return None if self.windows is None else self.windows.of(layer)


def build(
    source: Source, sizes: Sizes, names: Names, *, tied: bool, interleaved: bool
) -> Transformer:
    # The shapes first: they bound what is built by what the file really holds.
    _check_tensors(source, sizes, names, tied)
    model = unfilled(source, lambda: replace(sizes.spec(), tied_head=tied))
    read = _reader(source, names)
    with torch.no_grad():
        model.embedding.table.copy_(read("table"))
        model.classifier.read.gain.copy_(read("classifier gain"))
        if not tied:
            model.classifier.out.copy_(read("head").T)
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
            if sizes.bias:  # as a map of one input
                query, key, value = (read(f"{what} bias", depth)[:, None] for what in BIASED)
                attention.query_bias.copy_(_pairs(query, heads, interleaved)[0])
                attention.key_bias.copy_(_pairs(key, groups, interleaved)[0])
                attention.value_bias.copy_(value.view(groups, -1))
            for what, norm in zip(NORMED, attention.head_norms().values(), strict=False):
                assert norm.channel is not None
                gain = read(f"{what} norm", depth)[:, None]  # as a map of one input and one head
                norm.channel.copy_(_pairs(gain, 1, interleaved)[0, 0])
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
    A GGUF file of the architecture llama has the two of a pair next to each other.
    """
    if interleaved:
        pairs = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2)
    else:
        pairs = rows.unflatten(0, (heads, 2, -1))
    return pairs.permute(3, 0, 1, 2)


def _check_tensors(source: Source, sizes: Sizes, names: Names, tied: bool) -> None:
    """UserError unless the source has just the tensors that the sizes call for."""
    shapes = sizes.shapes()
    known = [FACTORS] if sizes.rope.divisors is not None else []
    known += [names["head"]] if tied else []
    expected = (
        (names[what].format(depth), shapes[what]) for what, depth in _expected(sizes, names, tied)
    )
    hint = "; a model of this family with biases or norms of queries and keys cannot be imported"
    check_tensors(source, expected, known, hint)
    if tied:
        check_tied(source, names["head"], names["table"])


def _expected(sizes: Sizes, names: Names, tied: bool) -> Iterator[tuple[str, int]]:
    """What each tensor is, and its layer. Lazy: a damaged number of layers may be enormous."""
    yield from ((what, 0) for what in ("table", "classifier gain"))
    if not tied:
        yield "head", 0
    inner = [what for what, name in names.items() if "{}" in name]
    yield from ((what, depth) for depth in range(sizes.layers) for what in inner)
