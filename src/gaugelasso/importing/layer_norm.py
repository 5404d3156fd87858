"""A LayerNorm over the stream, written as the transformer's normalisers: without mean and bias.

    LayerNorm(x) = gain (x - mean x) / sqrt(eps + var x) + bias

What is written to the stream is centred over the sites, so that the mean of the stream is zero and
its variance is its mean square. That changes no output, because every LayerNorm removes the mean.
Each map that reads a LayerNorm takes over its bias: W^T (n + b) = W^T n + W^T b.

Also what families with LayerNorm share: their GELU, their heads, and their structure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gaugelasso.importing.source import Settings
from gaugelasso.models import TransformerSpec, centred
from gaugelasso.models.gelu import GeluMlp
from gaugelasso.models.layers import Injector
from gaugelasso.models.operators import Attention

# The names that transformers has for GELU, and its two ways to compute it.
GELU: Mapping[str, Literal["gelu", "gelu_tanh"]] = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
        "gelu_tanh",
    ),
}
# A map [inputs, outputs] and its bias.
Maps = tuple[Tensor, Tensor | None]


def activation_of(config: Settings, key: str, default: str) -> Literal["gelu", "gelu_tanh"]:
    """The kind of MLP that the settings name; UserError for another activation than a GELU."""
    name = config.table.get(key) or default
    if not isinstance(name, str) or name not in GELU:
        raise config.error(key, f"only {', '.join(map(repr, GELU))} can be imported")
    return GELU[name]


def width_and_heads(config: Settings, width_key: str, heads_key: str) -> tuple[int, int]:
    """UserError unless the heads divide the width."""
    width, heads = config.whole(width_key), config.whole(heads_key)
    if width % heads:
        raise config.error(heads_key, f"must divide {width_key} = {width}")
    return width, heads


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """What the settings of each of these families say."""

    width: int
    layers: int
    heads: int
    d_f: int
    eps: float
    mlp: Literal["gelu", "gelu_tanh"]

    def biased(self, length: int, inputs: int, outputs: int, **others: Any) -> TransformerSpec:
        """Learned positions, GELU and biases; `others` are further keys of the structure."""
        d_k = self.width // self.heads
        spec = TransformerSpec.uniform(
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            d_k=d_k,
            d_v=d_k,
            d_f=self.d_f,
            length=length,
            inputs=inputs,
            outputs=outputs,
            rope=False,
            positions=True,
            eps=self.eps,
        )
        biases = {"attention_bias": True, "write_bias": True, "head_bias": True}
        return replace(spec, mlp=self.mlp, **(biases | others))


@dataclass(frozen=True)
class LayerNorm:
    """Gain and bias [D], in float64."""

    gain: Tensor
    bias: Tensor

    def bias_after(self, maps: Tensor, bias: Tensor | None = None) -> Tensor:
        """The bias of a map [D, c] that reads the normalised stream without `self.bias`."""
        moved = self.bias @ maps
        return moved if bias is None else moved + bias


@torch.no_grad()
def write_centred_(parameter: nn.Parameter, values: Tensor) -> None:
    """Fill a table or map into the stream, [..., D] as `values`, so that it writes mean zero."""
    parameter.copy_(centred(values).view(parameter.shape))


@torch.no_grad()
def write_bias_(write: Injector, values: Tensor) -> None:
    assert write.bias is not None
    write.bias.copy_(centred(values))


@torch.no_grad()
def fill_attention_(attention: Attention, norm: LayerNorm, joined: Maps, out: Maps) -> None:
    """`joined` are queries, keys and values side by side."""
    attention.read.gain.copy_(norm.gain)
    bias = norm.bias_after(*joined)
    leaves = (attention.query, attention.key, attention.value)
    for leaf, values in zip(leaves, joined[0].chunk(3, dim=1), strict=True):
        leaf.copy_(values.view(leaf.shape))
    query_bias, _, value_bias = bias.chunk(3)
    attention.query_bias.copy_(query_bias.view(attention.query_bias.shape))
    attention.value_bias.copy_(value_bias.view(attention.value_bias.shape))
    write_centred_(attention.out, out[0])
    assert out[1] is not None
    write_bias_(attention.write, out[1])


@torch.no_grad()
def fill_mlp_(mlp: GeluMlp, norm: LayerNorm, up: Maps, down: Maps) -> None:
    mlp.read.gain.copy_(norm.gain)
    mlp.up.copy_(up[0])
    mlp.up_bias.copy_(norm.bias_after(*up))
    write_centred_(mlp.down, down[0])
    assert down[1] is not None
    write_bias_(mlp.write, down[1])
