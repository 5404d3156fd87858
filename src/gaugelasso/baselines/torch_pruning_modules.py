"""The built-in transformer as plain modules, nn.Embedding and nn.Linear, for torch-pruning.

Gains and scales are folded into the maps beside them, so that the norm of a weight says what the
map does. Every map is as wide as the stream: it has zeros for the sites that its operator does
not read or write. Activations are token-major, [tokens, features]. Attention whose heads share
keys has one query map and one output map for each head that shares a key: all maps of it then
have the same channels, [key heads, 2 halves with RoPE, d_k].

The package finds out by autograd which channels belong together, and takes every operation that it
does not know for one on each channel. In softmax(q k) v it would find that d_k and d_v are one
axis. `couplings` is therefore a second forward pass, which shows only what belongs together.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso.errors import UserError
from gaugelasso.kernels.heads import rotate
from gaugelasso.kernels.stream import EPS
from gaugelasso.models import Transformer
from gaugelasso.models.layers import Extractor, Injector
from gaugelasso.models.operator_spec import AttentionSpec, MlpSpec
from gaugelasso.models.operators import Attention, SwiGLU
from gaugelasso.models.spec import TransformerSpec


class Normaliser(nn.Module):
    """x / sqrt(eps + sum_i w_i x_i^2); `tied` divides w, the squared gains, by their sum."""

    def __init__(self, width: int, tied: bool, eps: float):
        super().__init__()
        self.tied, self.eps = tied, eps
        # A parameter, although nothing trains it: the package does not cut buffers.
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight / self.weight.sum() if self.tied else self.weight
        level = (weight * x.square()).sum(-1, keepdim=True) + self.eps
        return x * torch.where(level > EPS, level.clamp(min=EPS).rsqrt(), 0.0)


class PlainAttention(nn.Module):
    """Attention of nn.Linear maps; `groups` key heads, each shared by `shared` query heads."""

    frequencies: Tensor

    def __init__(self, spec: AttentionSpec, width: int, causal: bool, tied: bool, eps: float):
        super().__init__()
        self.scale, self.causal, self.rope = spec.scale, causal, spec.frequencies is not None
        self.groups, shared = spec.kv_heads, spec.heads // spec.kv_heads
        keys = spec.kv_heads * (2 if self.rope else 1) * spec.keys
        values = spec.kv_heads * spec.values
        self.norm = Normaliser(width, tied, eps)
        self.query = nn.ModuleList(_linear(width, keys) for _ in range(shared))
        self.key, self.value = _linear(width, keys), _linear(width, values)
        self.out = nn.ModuleList(_linear(values, width) for _ in range(shared))
        self.register_buffer("frequencies", torch.tensor(spec.frequencies or ()))

    @property
    def key_copies(self) -> int:
        """The number of channels of a key map that one index of d_k stands for."""
        return self.groups * (2 if self.rope else 1)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        n = self.norm(x)
        key, value = self._rotated(self.key(n), batch), self._heads(self.value(n), batch)
        for query, out in zip(self.query, self.out, strict=True):
            weights = self._rotated(query(n), batch) @ key.mT * self.scale
            if self.causal:
                hidden = torch.ones_like(weights[0, 0], dtype=torch.bool).triu(1)
                weights = weights.masked_fill(hidden, -torch.inf)
            mixed = weights.softmax(-1) @ value
            x = x + out(mixed.transpose(1, 2).flatten(2).flatten(0, 1))
        return x

    def couplings(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        n = self.norm(x)
        key, value = self.key(n), self.value(n)
        met = [query(n) * key for query in self.query]
        for out in self.out:
            x = x + out(value)
        return x, met

    def _heads(self, rows: Tensor, batch: int) -> Tensor:
        """[N, groups * d] -> [B, groups, S, d]."""
        return rows.view(batch, -1, self.groups, rows.shape[1] // self.groups).transpose(1, 2)

    def _rotated(self, rows: Tensor, batch: int) -> Tensor:
        heads = self._heads(rows, batch)
        if not self.rope:
            return heads
        pairs = heads.unflatten(-1, (2, -1)).permute(1, 3, 4, 0, 2)
        return rotate(pairs, self.frequencies).permute(3, 0, 4, 1, 2).flatten(-2)


class PlainSwiGLU(nn.Module):
    """down(up(n) * silu(gate(n))) of nn.Linear maps."""

    def __init__(self, spec: MlpSpec, width: int, tied: bool, eps: float):
        super().__init__()
        self.norm = Normaliser(width, tied, eps)
        self.up, self.gate = _linear(width, spec.filters), _linear(width, spec.filters)
        self.down = _linear(spec.filters, width)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        return self.couplings(x)[0]

    def couplings(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        n = self.norm(x)
        return x + self.down(self.up(n) * F.silu(self.gate(n))), []


class PlainTransformer(nn.Module):
    """The network of a spec in plain modules, without weights: `load_` takes them from a model."""

    def __init__(self, spec: TransformerSpec):
        super().__init__()
        width, tokens = len(spec.sites), spec.input_kind == "tokens"
        norm: dict[str, Any] = {"tied": spec.norm == "tied", "eps": spec.eps}
        rows = spec.inputs + (spec.input_kind == "masked_patches")
        self.embedding = nn.Embedding(rows, width) if tokens else _linear(rows, width)
        self.positions = nn.Embedding(spec.length, width) if spec.positions else None
        self.operators = nn.ModuleDict()
        for op in spec.operators:
            self.operators[op.name] = (
                PlainAttention(op, width, spec.causal, **norm)
                if isinstance(op, AttentionSpec)
                else PlainSwiGLU(op, width, **norm)
            )
        self.norm = Normaliser(width, **norm)
        self.classifier = _linear(width, spec.outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (or pixels) [B, S, outputs]: those of the model, for any inputs."""
        batch, length = inputs.shape[:2]
        x = self._embedded(inputs)
        for operator in self.operators.values():
            x = operator(x, batch)
        return self.classifier(self.norm(x)).view(batch, length, -1)

    def couplings(self, inputs: Tensor) -> list[Tensor]:
        """Outputs from which the package traces which channels belong together."""
        x, met = self._embedded(inputs), []
        for operator in self.operators.values():
            assert isinstance(operator, PlainAttention | PlainSwiGLU)
            x, more = operator.couplings(x)
            met += more
        return [self.classifier(self.norm(x)), *met]

    def _embedded(self, inputs: Tensor) -> Tensor:
        x: Tensor = self.embedding(inputs.flatten(0, 1))
        if self.positions is None:
            return x
        batch, length = inputs.shape[:2]
        places = torch.arange(length, device=inputs.device).repeat(batch)
        return x + self.positions(places)

    def example(self) -> Tensor:
        """Inputs of two tokens, to trace with."""
        weight = self.embedding.weight
        if isinstance(self.embedding, nn.Embedding):
            return torch.zeros(1, 2, dtype=torch.long, device=weight.device)
        return weight.new_zeros(1, 2, self.embedding.in_features)

    @torch.no_grad()
    def load_(self, model: Transformer) -> None:
        """Take over the weights of a model of this structure."""
        own = dict(self.named_parameters())
        for name, value in plain_values(model):
            own[name].copy_(value)


def plain_of(model: Transformer) -> PlainTransformer:
    """A model in plain modules, with its weights, dtype and device.

    UserError if it has biases, means of a tied table, norms of queries and keys, a sliding window,
    or MLPs of another kind than SwiGLU.
    """
    spec = model.initial_spec
    for name in ("attention_bias", "write_bias", "head_bias", "tied_mean"):
        if getattr(spec, name):
            what = "means of a tied table" if name == "tied_mean" else "biases"
            raise UserError(
                f"the model has {name} = true; for Torch-Pruning, models with {what} are not "
                "supported"
            )
    if spec.qk_norm or any(isinstance(op, AttentionSpec) and op.window for op in spec.operators):
        what = "qk_norm = true" if spec.qk_norm else "attention with a sliding window"
        raise UserError(f"the model has {what}; for Torch-Pruning, that is not supported")
    if spec.post_norm:
        raise UserError(
            "the model has post_norm = true; for Torch-Pruning, only operators that normalise what "
            "they read are supported"
        )
    if spec.mlp != "swiglu":
        raise UserError(
            f"the model has mlp = {spec.mlp!r}; for Torch-Pruning, only MLPs of the kind 'swiglu' "
            "are supported"
        )
    with torch.device("meta"):  # initial values would be drawn from torch's own generator
        plain = PlainTransformer(model.spec())
    like = model.classifier.out
    plain = plain.to(like.dtype).to_empty(device=like.device)
    for name, operator in model.operators.items():
        if isinstance(operator, Attention) and operator.rope:
            twin = plain.operators[name]
            assert isinstance(twin, PlainAttention)
            twin.frequencies = operator.frequencies.clone()
    plain.load_(model)
    return plain


def plain_values(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The plain parameters by name, as differentiable functions of the model's parameters."""
    width, embedding, last = len(model.sites), model.embedding, model.classifier
    table = _write_map(embedding.table, embedding.write, width)
    yield "embedding.weight", table.T if embedding.tokens else table
    if embedding.positions is not None:
        yield "positions.weight", _write_map(embedding.positions, embedding.write, width).T
    for name, operator in model.operators.items():
        assert isinstance(operator, Attention | SwiGLU)
        yield f"operators.{name}.norm.weight", _level(operator.read, width)
        reads, writes = _maps(operator)
        for leaf, matrix in reads.items():
            yield f"operators.{name}.{leaf}.weight", _read_map(operator.read, matrix, width)
        for leaf, matrix in writes.items():
            yield f"operators.{name}.{leaf}.weight", _write_map(matrix, operator.write, width)
    yield "norm.weight", _level(last.read, width)
    yield "classifier.weight", _read_map(last.read, last.out, width)


def _maps(operator: Attention | SwiGLU) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The maps that read the stream, and those that write to it, by their plain names."""
    if isinstance(operator, SwiGLU):
        return {"up": operator.up, "gate": operator.gate}, {"down": operator.down}
    shared = operator.query.shape[1] // operator.key.shape[1]
    queries = {f"query.{j}": operator.query[:, j::shared] for j in range(shared)}
    outs = {f"out.{j}": operator.out[j::shared] for j in range(shared)}
    return {**queries, "key": operator.key, "value": operator.value}, outs


def _read_map(read: Extractor, matrix: Tensor, width: int) -> Tensor:
    """A map [d, ...] from the sites of a reader -> [outputs, D], with the gain in it."""
    return _spread(read.gain[:, None] * matrix.flatten(1), read.sites, width).T


def _write_map(matrix: Tensor, write: Injector, width: int) -> Tensor:
    """A map [..., d] to the sites of a writer -> [D, inputs], with the scale in it."""
    return _spread((matrix * write.scale).flatten(0, -2).T, write.sites, width)


def _level(read: Extractor, width: int) -> Tensor:
    """The weights of a reader's normaliser."""
    weight = read.gain.square() if read.tied else read.weight
    return _spread(weight.detach(), read.sites, width)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _spread(rows: Tensor, sites: Tensor, width: int) -> Tensor:
    """[d, ...] at their sites of a stream of `width`, zeros elsewhere."""
    return rows.new_zeros(width, *rows.shape[1:]).index_copy(0, sites, rows)
