"""A transformer whose layers may all have different widths, built from a spec.

Embedding -> attention and MLP of each depth, unless removed -> classifier, around one
residual stream of sites. With `post_norm`, the stream is normalised after each of them, also
where an operator was removed. Provides the axis table; contains no training.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from gaugelasso.axes import Axis, AxisTable, Compressible, Cost, Norm, Operation, Slot
from gaugelasso.models.centred_norm import StreamNorm
from gaugelasso.models.gelu import Approximation, GeluMlp
from gaugelasso.models.heads import Classifier, Head
from gaugelasso.models.hidden_head import HiddenClassifier
from gaugelasso.models.json_fields import SpecError
from gaugelasso.models.layers import STREAM, Embedding, OperatorOptions, Part
from gaugelasso.models.operator_spec import AttentionSpec, OperatorSpec
from gaugelasso.models.operators import Attention, Operator, SwiGLU
from gaugelasso.models.spec import TransformerSpec
from gaugelasso.models.tied import TiedClassifier, tied_axis

_EMBEDDING, _CLASSIFIER = "embedding", "classifier"


class Transformer(Compressible):
    """Build with `Transformer(spec, seed)`; call on [B, S] tokens or [B, S, n] patches."""

    sites: Tensor

    def __init__(self, spec: TransformerSpec, seed: int = 0):
        super().__init__()
        self.initial_spec = spec
        generator = torch.Generator().manual_seed(seed)
        by_token = spec.norm_energy == "token"
        placed: dict[str, Any] = {"eps": spec.eps, "by_token": by_token}
        norm: dict[str, Any] = {"tied": spec.norm == "tied", "plain": spec.post_norm, **placed}
        self.register_buffer("sites", torch.tensor(spec.sites, dtype=torch.long))
        self.embedding = Embedding(
            spec.inputs,
            spec.embed,
            spec.length,
            kind=spec.input_kind,
            positions=spec.positions,
            generator=generator,
            hold_unseen=spec.unseen_rows == "held",
            tied=spec.tied_head,
        )
        self.operators = nn.ModuleDict()
        # Each of 2 * layers operators adds to the stream. This keeps its variance close to one.
        shrink = (2 * spec.layers) ** -0.5
        options = OperatorOptions(
            **norm, shrink=shrink, write_bias=spec.write_bias, generator=generator
        )
        for op in spec.operators:
            self.operators[op.name] = _operator(op, spec, options)
        self.norms = nn.ModuleDict()
        if spec.post_norm:
            for name in norm_names(spec.layers):
                self.norms[name] = StreamNorm(len(spec.sites), **placed)
        self.classifier: Classifier | TiedClassifier
        norm["bias"] = spec.head_bias
        if spec.tied_head:
            norm.pop("plain")
            axis = f"{_EMBEDDING}.d_e"
            norm["mean"] = spec.tied_mean
            self.classifier = TiedClassifier(spec.classify, self.embedding, axis=axis, **norm)
        else:
            head = {**norm, "elementwise": spec.head_step == "elementwise"}
            self.classifier = _classifier(spec, {**head, "generator": generator})

    @property
    def is_pretrained(self) -> bool:
        """Whether its structure is one for pretrained weights (`importing.pretrained`)."""
        return self.initial_spec.norm_energy == "token" and self.initial_spec.unseen_rows == "held"

    def forward(self, inputs: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits (or pixels) [B, S, outputs].

        With `lengths` [B] the sequences are padded on the right. Outputs of padded positions mean
        nothing: leave them out of the loss. Pad with one token throughout, because normalisers
        take padded positions into their means over a batch.
        """
        batch, length = inputs.shape[:2]
        # In a causal model padding on the right is in nobody's past.
        seen = None if self.initial_spec.causal else lengths
        if lengths is not None and lengths.shape != (batch,):
            raise ValueError(f"lengths {list(lengths.shape)}: one for each of {batch} sequences")
        x = self.embedding(inputs, len(self.sites))
        for _, part in self._middle():
            if isinstance(part, Attention):
                x = part(x, batch, seen)
            else:
                x = part(x, batch) if isinstance(part, Operator) else part(x)
        return self.classifier(x).view(batch, length, -1)

    def axis_table(self) -> AxisTable:
        axes: list[Axis] = []
        fixed: list[Slot] = []
        costs: list[Cost] = []
        norms: list[Norm] = []
        operations: list[Operation] = []
        matrices: dict[str, int] = {}
        lookups: list[str] = []
        writers: list[Slot] = []
        readers: list[Slot] = []
        energies = [Slot("sites")]
        # Two stages for each operator, because it reads before it writes.
        for stage, (name, part) in enumerate(self._parts()):
            axes += part.axes(name)
            fixed += part.fixed(name)
            costs += part.costs(name)
            operations += part.operations(name)
            matrices |= part.matrices(name)
            lookups += part.lookups(name)
            norms += part.norms(name)
            if isinstance(part, StreamNorm):
                within = f"{name}.norm"
                readers += part.norm.reads(within, 2 * stage)
                writers += part.norm.writes(within, 2 * stage + 1)
                energies += part.norm.riders(within, gauge=True)
            if isinstance(part, Embedding | Operator):
                writers.append(
                    Slot(f"{name}.write.scale", link=f"{name}.write.sites", stage=2 * stage + 1)
                )
            if isinstance(part, Head | Operator):
                link = f"{name}.read.sites"
                readers.append(Slot(f"{name}.read.gain", link=link, stage=2 * stage))
                if not part.read.plain:
                    # A site with larger values needs a smaller weight to keep the normaliser.
                    energies.append(Slot(f"{name}.read.weight", link=link, power=-2))
                    energies.append(Slot(f"{name}.read.energy", link=link, power=2))
        required = {_EMBEDDING, _CLASSIFIER}
        if self.initial_spec.tied_head:  # its only axis is that of the embedding
            axes, required = tied_axis(axes), {_EMBEDDING}
        sides = tuple(writers), tuple(readers)
        axes.append(Axis(STREAM, STREAM, *sides, tuple(energies), growth="permutation"))
        length = self.initial_spec.length
        return AxisTable(
            axes=tuple(axes),
            fixed=tuple(fixed),
            matrices=matrices,
            lookups=tuple(lookups),
            norms=tuple(norms),
            costs=tuple(costs),
            required=frozenset(required),
            context=(length, (length + 1) / 2 if self.initial_spec.causal else float(length)),
            operations=tuple(operations),
            layers=self._layers(),
        )

    def _layers(self) -> tuple[tuple[str, ...], ...]:
        """The owners of the same depth."""
        layers: dict[int, tuple[str, ...]] = {}
        for name, part in zip(self.operators, self._operators(), strict=True):
            layers[part.depth] = (*layers.get(part.depth, ()), f"operators.{name}")
        return tuple(layers.values())

    def _operators(self) -> Iterator[Operator]:
        return (cast(Operator, part) for part in self.operators.values())

    def _parts(self) -> Iterator[tuple[str, Part]]:
        yield _EMBEDDING, self.embedding
        yield from self._middle()
        yield _CLASSIFIER, self.classifier

    def _middle(self) -> Iterator[tuple[str, Part]]:
        """Operators, and the normalisers between them, by name."""
        if not self.norms:
            for name, part in zip(self.operators, self._operators(), strict=True):
                yield f"operators.{name}", part
            return
        for name, norm in self.norms.items():
            if name in self.operators:
                yield f"operators.{name}", cast(Operator, self.operators[name])
            yield f"norms.{name}", cast(StreamNorm, norm)

    def remove_operator(self, name: str) -> None:
        del self.operators[name.removeprefix("operators.")]

    def spec(self) -> TransformerSpec:
        """The current structure, taken from the shapes of the tensors."""
        return replace(
            self.initial_spec,
            sites=tuple(self.sites.tolist()),
            embed=tuple(self.embedding.write.sites.tolist()),
            classify=tuple(self.classifier.read.sites.tolist()),
            operators=tuple(part.spec() for part in self._operators()),
            head_hidden=self.classifier.hidden,
        )

    def set_context_(self, length: int) -> None:
        """Set the most positions of a sequence, over which work per token is a mean.

        Of learned positions of tokens, the first ones stay.
        """
        spec, learned = self.initial_spec, self.embedding.positions
        if learned is not None and length != spec.length:
            if length > spec.length or not self.embedding.tokens:
                raise SpecError(f"length = {length}: the model has {spec.length} learned positions")
            self.embedding.positions = nn.Parameter(learned.detach()[:length].clone())
        self.initial_spec = replace(spec, length=length)

    def structure(self) -> dict:
        return self.spec().to_dict()

    @classmethod
    def from_structure(cls, structure: dict[str, Any]) -> Self:
        return cls(TransformerSpec.from_dict(structure))

    def counts(self) -> dict[str, int]:
        return {"sites": len(self.sites), "operators": len(self.operators)}


def norm_names(layers: int) -> list[str]:
    """What a post-norm follows: the embedding, and each operator."""
    return ["embedding", *(f"{kind}_{k}" for k in range(layers) for kind in ("attention", "mlp"))]


def _classifier(spec: TransformerSpec, common: dict[str, Any]) -> Classifier:
    if not spec.head_hidden:
        return Classifier(spec.classify, spec.outputs, **common)
    hidden: dict[str, Any] = {"hidden": spec.head_hidden, "approximation": _approximation(spec)}
    return HiddenClassifier(spec.classify, spec.outputs, **hidden, **common)


def _approximation(spec: TransformerSpec) -> Approximation:
    return "tanh" if spec.mlp == "gelu_tanh" else "none"


def _operator(op: OperatorSpec, spec: TransformerSpec, options: OperatorOptions) -> Operator:
    if isinstance(op, AttentionSpec):
        bias, qk_norm = spec.attention_bias, spec.qk_norm
        return Attention(op, options, causal=spec.causal, bias=bias, qk_norm=qk_norm)
    if spec.mlp == "swiglu":
        return SwiGLU(op, options)
    return GeluMlp(op, options, _approximation(spec))


def same_network(one: TransformerSpec, other: TransformerSpec) -> bool:
    """Whether two structures build the same network: one is stored with float32 frequencies."""
    return _stored(one) == _stored(other)


def _stored(spec: TransformerSpec) -> TransformerSpec:
    operators = [
        replace(op, frequencies=tuple(torch.tensor(op.frequencies).tolist()))
        if isinstance(op, AttentionSpec) and op.frequencies is not None
        else op
        for op in spec.operators
    ]
    return replace(spec, operators=tuple(operators))
