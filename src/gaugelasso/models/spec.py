"""The structure of a transformer as JSON-compatible data: enough to build the exact network.

Lists the residual sites that each operator reads and writes, and its inner widths. Operators
may differ in all of them. Holds no weights.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args, get_origin

from gaugelasso.models.json_fields import SpecError, checked_fields, hints_of, shown
from gaugelasso.models.operator_spec import (
    LARGEST,
    LATER_OF_ATTENTION,
    AttentionSpec,
    MlpSpec,
    OperatorSpec,
    check_operator,
    check_reach,
    operator_from_dict,
    positive,
)

# Keys that structures of earlier versions do not have, and what their absence means.
_LATER = {
    "eps": 0.0, "attention_bias": False, "norm_energy": "batch", "unseen_rows": "pressed",
    "head_step": "matrix", "mlp": "swiglu", "write_bias": False, "head_bias": False,
    "tied_head": False, "qk_norm": False, "post_norm": False, "head_hidden": 0,
    "tied_mean": False,
}  # fmt: skip


# Masked patches carry one more value, 1 where the patch is hidden.
InputKind = Literal["tokens", "patches", "masked_patches"]


@dataclass(frozen=True)
class TransformerSpec:
    """A whole network.

    `sites` are the residual positions by their initial number; halves of a split site share
    it. `inputs` is the vocabulary (tokens) or the patch size (patches, masked or not);
    `outputs` the classes or pixels. `layers` is the initial depth. `norm` is "slow" or
    "tied" (the paper's prescaled RMS); `eps` is added to what it takes the root of.
    `mlp` is "swiglu", or "gelu" or "gelu_tanh": a GELU between two maps, with biases of its hidden
    channels. With `attention_bias`, queries, keys and values have biases; with `write_bias`, what
    operators write; with `head_bias`, the outputs. With `tied_head` the token table is the map of
    the classifier too; `embed` and `classify` then have one entry for each of its columns. With
    `tied_mean` the map is the table plus a mean of each row, which a centred table lacks. With
    `qk_norm`, queries and keys are normalised in each head, with the same `eps`.

    With `post_norm`, a LayerNorm in place follows the embedding and each operator, and operators
    and classifier read the stream as it is: an encoder like BERT. `head_hidden` channels, if any,
    are a hidden layer of the classifier, with the GELU of the MLPs and a LayerNorm.

    The three from `norm_energy` on change no output. They say how compression treats the model:
    - `norm_energy`: slow norms follow mean squares of their inputs over a "batch", or over inputs
      that each "token" has normalised; the latter follow under pressure alone
    - `unseen_rows`: rows of the token table that a batch does not use are "pressed" or "held"
    - `head_step`: the head is stepped as a "matrix" (Muon) or "elementwise" (Adam), as a tied one
      always is
    """

    sites: tuple[int, ...]
    length: int
    layers: int
    inputs: int
    outputs: int
    embed: tuple[int, ...]
    classify: tuple[int, ...]
    operators: tuple[OperatorSpec, ...]
    input_kind: InputKind = "tokens"
    causal: bool = True
    positions: bool = False
    norm: Literal["slow", "tied"] = "slow"
    eps: float = 0.0
    attention_bias: bool = False
    norm_energy: Literal["batch", "token"] = "batch"
    unseen_rows: Literal["pressed", "held"] = "pressed"
    head_step: Literal["matrix", "elementwise"] = "matrix"
    mlp: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    write_bias: bool = False
    head_bias: bool = False
    tied_head: bool = False
    qk_norm: bool = False
    post_norm: bool = False
    head_hidden: int = 0
    tied_mean: bool = False

    @classmethod
    def uniform(
        cls,
        *,
        width: int,
        layers: int,
        heads: int,
        d_k: int,
        d_v: int,
        d_f: int,
        length: int,
        inputs: int,
        outputs: int,
        kv_heads: int | None = None,
        rope: bool = True,
        rope_base: float = 10_000.0,
        input_kind: InputKind = "tokens",
        causal: bool = True,
        positions: bool = False,
        norm: Literal["slow", "tied"] = "slow",
        eps: float = 0.0,
    ) -> "TransformerSpec":
        """Equal layers of full width: the structure before compression."""
        # Here, where the value is the one given: below they are numbers of sites and of pairs.
        positive("width", width)
        positive("d_k", d_k)
        if rope and d_k % 2:
            raise SpecError(f"d_k = {d_k} is odd; RoPE rotates pairs, give an even d_k")
        everywhere = tuple(range(width))
        pairs = d_k // 2
        frequencies = tuple(rope_base ** (-i / pairs) for i in range(pairs)) if rope else None
        operators: list[OperatorSpec] = []
        for depth in range(layers):
            attention = AttentionSpec(
                depth=depth,
                reads=everywhere,
                writes=everywhere,
                heads=heads,
                kv_heads=kv_heads or heads,
                keys=pairs if rope else d_k,
                values=d_v,
                scale=1 / math.sqrt(d_k),
                frequencies=frequencies,
            )
            operators += [attention, MlpSpec(depth, everywhere, everywhere, d_f)]
        return cls(
            sites=everywhere,
            length=length,
            layers=layers,
            inputs=inputs,
            outputs=outputs,
            embed=everywhere,
            classify=everywhere,
            operators=tuple(operators),
            input_kind=input_kind,
            causal=causal,
            positions=positions,
            norm=norm,
            eps=eps,
        )

    def __post_init__(self) -> None:
        for name, hint in hints_of(TransformerSpec).items():
            if get_origin(hint) is Literal and (value := getattr(self, name)) not in get_args(hint):
                names = ", ".join(get_args(hint))
                raise SpecError(f"{name} = {shown(value)}: choose one of: {names}")
        if not 0 <= self.eps < math.inf:
            raise SpecError(f"eps = {self.eps}: must be a finite number of at least 0")
        if self.qk_norm and self.norm != "slow":
            raise SpecError(f"norm = {self.norm!r}: a model with qk_norm has norm = 'slow'")
        _check_encoder(self)
        positive("width", len(self.sites))
        for name in ("length", "layers", "inputs", "outputs"):
            positive(name, getattr(self, name))
        for site in self.sites:
            if not 0 <= site <= LARGEST:
                raise SpecError(f"site {shown(site)}: must be a whole number of 0 to {LARGEST}")
        for who, reach in (("embedding", self.embed), ("classifier", self.classify)):
            check_reach(who, reach, len(self.sites))
        _check_tied(self)
        seen: set[str] = set()
        for operator in self.operators:
            if operator.name in seen:
                raise SpecError(f"operator {operator.name!r} appears twice")
            seen.add(operator.name)
            if not 0 <= operator.depth < self.layers:
                raise SpecError(f"{operator.name}: depth outside 0..{self.layers - 1}")
            check_operator(operator, len(self.sites), self.causal)

    @property
    def weights(self) -> int:
        """Elements of all matrices and tables; gains, scales and buffers are not counted."""
        last = self.head_hidden or len(self.classify)
        total = self.inputs * len(self.embed) + len(self.classify) * self.head_hidden
        total += 0 if self.tied_head else last * self.outputs
        total += self.positions * self.length * len(self.embed)
        for op in self.operators:
            reads, writes = len(op.reads), len(op.writes)
            if isinstance(op, MlpSpec):
                total += ((1 + (self.mlp == "swiglu")) * reads + writes) * op.filters
            else:
                keys = op.keys if op.frequencies is None else 2 * op.keys
                total += reads * (op.heads + op.kv_heads) * keys
                total += (reads * op.kv_heads + op.heads * writes) * op.values
        return total

    def to_dict(self) -> dict[str, Any]:
        """As JSON data. Keys that were added later are left out where they say nothing."""
        data = _without_defaults(asdict(self), _LATER)
        parts = (_without_defaults(each, LATER_OF_ATTENTION) for each in data["operators"])
        data["operators"] = tuple(parts)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TransformerSpec":
        """Build from JSON data; SpecError names a missing, unknown or wrong key."""
        plain = checked_fields("structure", cls, data, _LATER, skip="operators")
        entries = data["operators"]
        if not isinstance(entries, list | tuple):
            raise SpecError(f"structure: operators = {entries!r} must be a list")
        return cls(**plain, operators=tuple(map(operator_from_dict, entries)))


def _without_defaults(data: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in data.items() if k not in defaults or v != defaults[k]}


def _check_tied(spec: TransformerSpec) -> None:
    """The table of tokens is a map to the outputs."""
    if not spec.tied_head:
        if spec.tied_mean:
            raise SpecError("tied_mean needs tied_head: a head of its own has its means")
        return
    if spec.post_norm or spec.head_hidden:
        raise SpecError("tied_head: an encoder's head has a map of its own")
    if spec.input_kind != "tokens" or spec.inputs != spec.outputs:
        raise SpecError(
            f"tied_head: a table of {spec.inputs} {spec.input_kind} is no map to "
            f"{spec.outputs} outputs; it needs as many tokens as outputs"
        )
    if len(spec.embed) != len(spec.classify):
        raise SpecError(
            f"tied_head: the embedding writes {len(spec.embed)} sites and the classifier reads "
            f"{len(spec.classify)}; each has one for every column of the table"
        )


def _check_encoder(spec: TransformerSpec) -> None:
    """What follows from `post_norm` and `head_hidden`."""
    if spec.post_norm and spec.causal:
        raise SpecError("post_norm = True needs causal = False: such a decoder is not built")
    if spec.post_norm and spec.norm != "slow":
        raise SpecError(f"post_norm = True needs norm = 'slow', not {spec.norm!r}")
    if spec.head_hidden:
        positive("head_hidden", spec.head_hidden)
        if spec.mlp == "swiglu":
            raise SpecError("head_hidden needs an mlp with GELU, not 'swiglu'")
