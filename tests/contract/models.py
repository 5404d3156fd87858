"""The rows of the contract suite: add one row and inherit every test in this folder.

A row is built as born and after random drops on all axes, some rows at a second seed, which has
its own random tiny shape. Everything is float64.
"""

import copy
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gaugelasso.axes import AxisTable, Compressible, Tensors, named_tensors, spread, width
from gaugelasso.compress import reference
from gaugelasso.compress.drop import Decision, cascade
from gaugelasso.compress.surgery import cut_
from gaugelasso.models import AttentionSpec, Transformer, TransformerSpec
from gaugelasso.plugins import NamedBy, Reference
from tests.examples import example


@dataclass(frozen=True)
class Row:
    """A model family: `build` from a source of random shapes, `rebuild` from a structure."""

    name: str
    build: Callable[[random.Random], Compressible]
    inputs: Callable[[Any, torch.Generator], Tensor]
    rebuild: Callable[[dict], Compressible]


@dataclass(frozen=True)
class Case:
    row: Row
    dropped: bool
    seed: int

    def __str__(self) -> str:
        return f"{self.row.name}-{'dropped' if self.dropped else 'born'}-{self.seed}"


# How compression treats an imported model.
PRETRAINED: dict[str, Any] = {
    "norm_energy": "token",
    "unseen_rows": "held",
    "head_step": "elementwise",
}


# What GPT-2 has.
GPT2 = {"mlp": "gelu_tanh", "attention_bias": True, "write_bias": True, "head_bias": True}
# What encoders like BERT have: the stream is normalised in place.
BERT = {**GPT2, "mlp": "gelu", "post_norm": True}
ENCODER: dict[str, Any] = {"positions": True, "rope": False, "causal": False}


def transformer(
    name: str,
    also: dict[str, Any] | None = None,
    windows: tuple[int | None, ...] = (),
    **settings: Any,
) -> Row:
    """`settings` are those of `TransformerSpec.uniform`, `also` other fields of the spec.

    `windows` are those of the attention of each layer.
    """

    def build(shape: random.Random) -> Transformer:
        tiny = {
            "width": shape.randint(5, 7),
            "layers": 2,
            "heads": 2,
            "d_k": 2 * shape.randint(2, 4),
            "d_v": shape.randint(3, 5),
            "d_f": shape.randint(4, 6),
            "length": shape.randint(4, 6),
            "inputs": shape.randint(5, 9),
            "outputs": shape.randint(3, 7),
        }
        spec = replace(TransformerSpec.uniform(**(tiny | settings)), **also or {})
        if windows:
            operators = (
                replace(op, window=windows[op.depth]) if isinstance(op, AttentionSpec) else op
                for op in spec.operators
            )
            spec = replace(spec, operators=tuple(operators))
        model = Transformer(spec, shape.randrange(1000))
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            # Zeros would hide a bias that is left out, and so would equal numbers.
            if name.endswith(("bias", "classifier.mean", "classifier.spread")):
                nn.init.normal_(parameter, std=0.5, generator=generator)
        return model

    return Row(name, build, transformer_inputs, Transformer.from_structure)


def transformer_inputs(model: Transformer, generator: torch.Generator) -> Tensor:
    spec = model.initial_spec
    if spec.input_kind == "tokens":
        return torch.randint(spec.inputs, (2, spec.length), generator=generator)
    patches = torch.randn(2, spec.length, spec.inputs, generator=generator, dtype=torch.float64)
    if spec.input_kind == "patches":
        return patches
    hidden = torch.rand(2, spec.length, 1, generator=generator) < 0.5
    return torch.cat([patches.masked_fill(hidden, 0), hidden.double()], dim=-1)


def encoder(name: str) -> Row:
    """The example with LayerNorm, GELU and biases."""
    module = example("encoder")

    def build(shape: random.Random) -> Compressible:
        torch.manual_seed(shape.randrange(1000))
        return module.Encoder.uniform(
            width=shape.randint(5, 7), d_k=shape.randint(3, 5), hidden=shape.randint(4, 6),
            patches=shape.randint(4, 6), pixels=shape.randint(5, 9), classes=shape.randint(3, 7),
        )  # fmt: skip

    def inputs(model: Any, generator: torch.Generator) -> Tensor:
        shape = 2, len(model.positions), len(model.embedding)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Row(name, build, inputs, module.Encoder.from_structure)


EXAMPLE = Path(__file__).parents[2] / "examples" / "your_model.py"


def perceptron() -> Row:
    """The example of a model of the user: no links, no normaliser, and its operator is required."""
    by = NamedBy(EXAMPLE.parent)
    family = Reference.parse("model.module", f"{EXAMPLE.name}:Perceptron", by).load(by)

    def build(shape: random.Random) -> Compressible:
        torch.manual_seed(shape.randrange(1000))
        return family(shape.randint(3, 5), shape.randint(5, 9), shape.randint(2, 4))

    def inputs(model: Any, generator: torch.Generator) -> Tensor:
        return torch.randn(6, model.up.shape[0], generator=generator, dtype=torch.float64)

    return Row("perceptron", build, inputs, family.from_structure)


ROWS = [
    transformer("rope"),
    transformer("rope_positions", positions=True),
    transformer("grouped_keys", PRETRAINED, heads=4, kv_heads=2, eps=0.01),
    transformer("biases", {"attention_bias": True}, heads=4, kv_heads=2),
    # As Qwen3, with a window in one layer; and with biases, without RoPE and eps.
    transformer(
        "qk_norm",
        PRETRAINED | {"qk_norm": True},
        windows=(2, None),
        length=8,
        heads=4,
        kv_heads=2,
        d_k=8,
        eps=0.01,
    ),
    transformer("qk_norm_no_rope", {"qk_norm": True, "attention_bias": True}, rope=False, d_k=6),
    transformer("gpt2", PRETRAINED | GPT2, width=8, positions=True, rope=False, eps=0.01),
    transformer("bert", PRETRAINED | BERT | {"head_hidden": 6}, width=8, eps=0.01, **ENCODER),
    transformer("post_norm", {"post_norm": True}, causal=False),
    # GELU without biases of what is written, and SwiGLU with them.
    transformer("gelu", {"mlp": "gelu"}, causal=False),
    transformer("write_biases", {"write_bias": True, "head_bias": True}),
    # A tied table with what else may be on its axis: positions, outputs with biases, and means.
    transformer(
        "tied_head",
        PRETRAINED | {"tied_head": True, "head_bias": True, "tied_mean": True},
        width=8,
        inputs=7,
        outputs=7,
        positions=True,
        eps=0.01,
    ),
    transformer("full_no_rope", rope=False, causal=False),
    transformer("patches", input_kind="patches", positions=True, rope=False, causal=False),
    transformer("masked", input_kind="masked_patches", positions=True, rope=False, causal=False),
    perceptron(),
    encoder("encoder"),
]
SEEDS = (0, 1)
# Every feature of a model is in a row of its own. Other sizes and other drops concern what rows
# share: one transformer with grouped keys and the two other families show them, after drops.
TWICE = ("biases", "perceptron", "encoder")
CASES = [
    Case(row, dropped, seed)
    for row in ROWS
    for dropped in (False, True)
    for seed in (SEEDS if dropped and row.name in TWICE else SEEDS[:1])
]
# For what only the built-in transformer has, such as a spec.
TRANSFORMERS = [case for case in CASES if case.row.inputs is transformer_inputs]

# For tests of whole models: after drops one has all that it had at birth, in unequal sizes. One of
# each kind of stream and head is tested at birth too, and all of them in tests of every axis.
AT_BIRTH = ("rope", "bert", "tied_head", "perceptron", "encoder")
WHOLE = [case for case in CASES if case.dropped or case.row.name in AT_BIRTH]

# For tests of every axis: a second seed would add nothing but sizes.
FIRST = [case for case in CASES if case.seed == SEEDS[0]]


def axis_names(case: Case) -> list[str]:
    """The axes of one of the two layers, and those of no layer.

    At birth the first layer, after drops the second: a row has every axis in one of its cases. A
    test goes through them by itself: model, table and output are then made once for all axes.
    """
    other = "_0." if case.dropped else "_1."
    return [a.name for a in table_of(case).axes if other not in a.name]


def is_linked(case: Case) -> bool:
    """Whether the model has an axis that others reach through links, as a residual stream."""
    return any(axis.linked() for axis in table_of(case).axes)


def has_norms(case: Case) -> bool:
    return bool(table_of(case).norms)


@functools.cache
def table_of(case: Case) -> AxisTable:
    """The table of the case's model as it is made."""
    return made(case).axis_table()


def make(case: Case) -> Any:
    """The case's model, in eval mode, free to be changed."""
    return clone(made(case))


def clone(model: Compressible, share_tensors: bool = False) -> Any:
    """A copy of a model. It shares frozen dataclasses, such as specs, as nothing changes them.

    Nor does anything here register a hook. `copy.deepcopy` would copy the empty dictionaries of
    hooks, a dozen in each module, and take five times as long.
    """
    twins: dict[int, Any] = {id(each): each for each in named_tensors(model).values()}
    if not share_tensors:
        twins = {key: _copied(tensor) for key, tensor in twins.items()}

    modules: dict[int, Any] = {}

    def twin(module: nn.Module) -> Any:
        new = modules[id(module)] = type(module).__new__(type(module))
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                value = {key: None if x is None else twins[id(x)] for key, x in value.items()}
            elif name == "_modules":
                value = {key: twin(part) for key, part in value.items()}
            elif "_hooks" not in name and not _is_frozen(value):
                # A part may refer to another, as a tied classifier does to its embedding.
                value = copy.deepcopy(value, dict(modules))
            vars(new)[name] = value
        return new

    return twin(model)


def _copied(tensor: Tensor) -> Tensor:
    new = tensor.detach().clone()
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _is_frozen(value: Any) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


@functools.cache
def made(case: Case) -> Any:
    """The case's model, in eval mode, which nothing may change."""
    model = case.row.build(random.Random(case.seed)).double().eval()
    generator = torch.Generator().manual_seed(case.seed)
    _roughen_(model, generator)
    if case.dropped:
        decision = random_decision(model, generator)
        cut_(model, model.axis_table(), decision.keeps, decision.removed)
    return model


@torch.no_grad()
def _roughen_(model: Compressible, generator: torch.Generator) -> None:
    """Nothing stays at a value of birth that could hide a mistake."""

    def between(tensor: Tensor, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(tensor.shape, generator=generator).double()

    for parameter in model.parameters():
        if parameter.ndim == 1 or not parameter.any():
            sign = torch.where(between(parameter, -1, 1) > 0, 1, -1)
            parameter.copy_(sign * between(parameter, 0.5, 2))
    tensors = named_tensors(model)
    for norm in model.axis_table().norms:
        weight, energy = tensors[norm.weight], tensors[norm.energy]
        weight.copy_(weight * between(weight, 0.5, 2))
        energy.copy_(between(energy, 0.5, 2))


def random_decision(model: Compressible, generator: torch.Generator, removed: int = 0) -> Decision:
    """Losses on every axis, with `removed` operators gone, or as many as may vanish."""
    table, tensors = model.axis_table(), named_tensors(model)
    owners = table.owners()
    victims = [owner for owner in owners if owner not in table.required][:removed]
    for _ in range(100):
        keeps = {}
        for axis in table.axes:
            order = torch.randperm(width(axis, tensors), generator=generator)
            most = max(1, len(order) // 3)
            gone = int(torch.randint(1, most + 1, (), generator=generator))
            keeps[axis.name] = order >= gone
        for owner in victims:
            keeps[owners[owner][-1]].zero_()
        decision = cascade(table, tensors, keeps)
        if decision is not None and len(decision.removed) == len(victims):
            return decision
    raise AssertionError("no random decision fits; widen the row's shapes")


def output(model: Compressible, case: Case) -> Tensor:
    """The model's answer to the case's own inputs."""
    with torch.no_grad():
        return model(case.row.inputs(model, torch.Generator().manual_seed(7)))


def loss(model: Compressible, case: Case) -> Tensor:
    """A scalar task, neither even nor symmetric in the outputs."""
    answer = model(case.row.inputs(model, torch.Generator().manual_seed(7)))
    weights = torch.randn(answer.shape, generator=torch.Generator().manual_seed(8))
    return (answer * weights.double()).sum() + answer.square().mean()


def difference(new: Tensor, old: Tensor) -> float:
    """The largest deviation, relative to the largest value."""
    new, old = new.detach(), old.detach()
    return float((new - old).abs().max() / old.abs().max().clamp(min=1e-300))


@torch.no_grad()
def silence_(model: Compressible, keeps: dict[str, Tensor], table: AxisTable | None = None) -> None:
    """Zero the indices that are to go: both sides, and their share of the normalisers."""
    table, tensors = table or model.axis_table(), named_tensors(model)
    shares = {norm.weight for norm in table.norms}
    for name, keep in keeps.items():
        axis = table[name]
        shares_here = tuple(slot for slot in axis.riders if slot.tensor in shares)
        for slot in axis.side_a + axis.side_b + shares_here:
            tensors[slot.tensor].mul_(spread(keep.double(), slot, tensors))


def imbalance(table: AxisTable, tensors: Tensors) -> dict[str, Tensor]:
    """|log(eps_A / eps_B)| per index: 0 at gauge balance."""
    result = {}
    for axis in table.axes:
        if not axis.gauge:
            continue
        eps_a, eps_b = (
            reference.side_rms(axis, slots, tensors).clamp(min=1e-38) for _, slots in axis.sides()
        )
        result[axis.name] = (eps_a / eps_b).log().abs()
    return result


def sliced(tensor: Tensor, name: str, table: AxisTable, keeps: dict[str, Tensor]) -> Tensor:
    """What a cut should leave of a tensor, dim by dim."""
    for axis in table.axes:
        for slot in axis.direct():
            if slot.tensor == name:
                tensor = tensor.movedim(slot.dim, 0)[keeps[axis.name]].movedim(0, slot.dim)
    return tensor
