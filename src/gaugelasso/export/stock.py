"""Models that are stock Llamas: which are, why another is not, and their weights by stock names.

Gains and the constant factors of normalisers become weights of norms, write scales and the softmax
scale become parts of the maps. The outputs are the same.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gaugelasso.errors import UserError
from gaugelasso.export.rope import fitted
from gaugelasso.export.source import Source
from gaugelasso.importing.decoder import BIASED, Names, Sizes
from gaugelasso.inference.folding import widened
from gaugelasso.models import AttentionSpec, MlpSpec, Transformer, TransformerSpec
from gaugelasso.models.layers import Extractor
from gaugelasso.models.operators import Attention, Operator, SwiGLU
from gaugelasso.models.residual import EPS
from gaugelasso.models.tied import TiedClassifier

# Relative differences of normaliser weights that rounding explains.
_ROUNDING = 1e-5
# Of a tied table's scale: the weights of norms are stored in half precision too.
_LARGEST_GAIN = 1e4
_KINDS = ("attention", "mlp")
# Fields of an operator's structure that all layers must share, and how they are named.
_SHARED = {
    "heads": "heads", "kv_heads": "key/value heads", "keys": "pairs of key channels",
    "values": "value channels", "filters": "filters",
}  # fmt: skip


def check_like_llama(spec: TransformerSpec, form: str, path: Path) -> None:
    """UserError if no cut makes this model a stock Llama; `path` is where it is."""
    for why in _unlike_llama(spec):
        raise UserError(f"{_none(form, path)}: {why}; choose hf, onnx, pt2 or native")


def _none(form: str, path: Path) -> str:
    return f"form {form!r} holds stock Llama models, and {str(path)!r} is none"


def stock_sizes(source: Source, form: str, unit: int | None = None) -> Sizes:
    """The settings of the Llama that the model is; UserError says which operator is in the way.

    The width and the filters are multiples of `unit`. Without one the filters stay as they are, and
    the width is a multiple of the heads, as transformers wants it. What is missing is zeros.
    """
    spec, model = source.spec, source.model
    where = _none(form, source.run)
    check_like_llama(spec, form, source.run)
    for why in _cut_apart(model, spec):
        raise UserError(
            f"{where}: {why}; compress with compress.shape = 'llama' and compress.removal = "
            "'harm', or choose hf, onnx, pt2 or native"
        )
    attention, mlp = spec.operators[:2]
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mlp, MlpSpec)
    assert attention.frequencies is not None
    rope = fitted(attention.frequencies)
    if rope is None:
        raise UserError(
            f"{where}: no rope_theta gives the RoPE frequencies of operators.{attention.name}, "
            "plain or scaled by linear or llama3; choose hf, onnx, pt2 or native"
        )
    width = _filled(len(spec.sites), unit or attention.heads)
    return Sizes(
        width=width,
        layers=len(spec.operators) // 2,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        d_k=attention.values,
        d_f=_filled(mlp.filters, unit or 1),
        vocabulary=spec.inputs,
        length=spec.length,
        rope=rope,
        # With an eps of 0, a token without signal would be NaN; here it is 0.
        eps=spec.eps / _level(model.classifier.read, width) or EPS,
        bias=spec.attention_bias,
    )


def _filled(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def stock_weights(
    model: Transformer, sizes: Sizes, names: Names, *, interleaved: bool
) -> dict[str, Tensor]:
    """The float32 weights under these names; no head where it is tied, or equals the table.

    With `interleaved`, the two of each RoPE pair are next to each other, as GGUF files of the
    architecture llama have them.
    """
    found: dict[str, Tensor] = {}

    def put(what: str, tensor: Tensor, depth: int = 0) -> None:
        found[names[what].format(depth)] = tensor.detach().cpu().float().contiguous()

    def put_reading(what: str, rows: Tensor, depth: int) -> None:
        put(what, widened(rows, 1, sizes.width), depth)

    scale, gain = model.embedding.write.scale, model.classifier.read.gain
    table = widened(model.embedding.table * scale, 1, sizes.width)
    head = widened(model.classifier.out.T, 1, sizes.width)
    # In a gauge with scales of 1, a tied table is both. The gain takes the scales.
    tied = isinstance(model.classifier, TiedClassifier) and _divides(gain, scale)
    put("table", table)
    put("classifier gain", _norm(model.classifier.read, sizes.width, scale if tied else None))
    if not tied and not torch.equal(table, head):
        put("head", head)
    parts = list(model.operators.values())
    for depth, (attention, mlp) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        assert isinstance(attention, Attention)
        assert isinstance(mlp, SwiGLU)
        sharper = attention.softmax_scale * math.sqrt(sizes.d_k)
        put("attention gain", _norm(attention.read, sizes.width), depth)
        put_reading("query", _rows(attention.query * sharper, interleaved), depth)
        put_reading("key", _rows(attention.key, interleaved), depth)
        put_reading("value", attention.value.flatten(1).T, depth)
        out = (attention.out * attention.write.scale).flatten(0, 1).T
        put("out", widened(out, 0, sizes.width), depth)
        if sizes.bias:
            query, key, value = attention.biases()
            biases = (_rows(query[None] * sharper, interleaved), _rows(key[None], interleaved))
            for what, bias in zip(BIASED, (*biases, value), strict=True):
                put(f"{what} bias", bias.flatten(), depth)
        put("mlp gain", _norm(mlp.read, sizes.width), depth)
        put_reading("gate", widened(mlp.gate.T, 0, sizes.d_f), depth)
        put_reading("up", widened(mlp.up.T, 0, sizes.d_f), depth)
        down = widened(mlp.down * mlp.write.scale, 0, sizes.d_f)
        put("down", widened(down.T, 0, sizes.width), depth)
    return found


def _unlike_llama(spec: TransformerSpec) -> Iterator[str]:
    """What no Llama has, cut or not."""
    if spec.mlp != "swiglu":
        yield f"its MLPs are {spec.mlp!r}, not 'swiglu'"
    if spec.positions:
        yield "it has learned positions"
    if spec.write_bias or spec.head_bias:
        yield f"{'its operators write' if spec.write_bias else 'its outputs have'} biases"
    if spec.tied_mean:
        yield "its head is the table plus a mean of each row"
    if spec.qk_norm:
        yield "it normalises queries and keys"
    if spec.outputs != spec.inputs:
        yield f"it has {spec.outputs:,} outputs for {spec.inputs:,} tokens"
    for op in spec.operators:
        if isinstance(op, AttentionSpec) and op.frequencies is None:
            yield f"operators.{op.name} has no RoPE"
        if isinstance(op, AttentionSpec) and op.window is not None and op.window < spec.length:
            yield f"operators.{op.name} has a sliding window of {op.window:,} tokens"


def _cut_apart(model: Transformer, spec: TransformerSpec) -> Iterator[str]:
    """How operators differ from each other, or from a whole layer of full reads and writes."""
    yield from _missing(spec)
    whole = tuple(range(len(spec.sites)))
    reaches = [("embedding", "writes", spec.embed)]
    for op in spec.operators:
        reaches += [(f"operators.{op.name}", "reads", op.reads)]
        reaches += [(f"operators.{op.name}", "writes", op.writes)]
    for who, does, sites in [*reaches, ("classifier", "reads", spec.classify)]:
        if sites != whole:
            order = ", in another order" if len(sites) == len(whole) else ""
            yield f"{who} {does} {len(sites):,} of {len(whole):,} sites{order}"
    yield from _unequal(spec)
    reads = [(f"operators.{op.name}", _read(model, op.name)) for op in spec.operators]
    first = _level(model.classifier.read, 1)
    for who, read in [*reads, ("classifier", model.classifier.read)]:
        weights = _weights(read)
        ratio = float(weights.max() / weights.min())
        if not ratio <= 1 + _ROUNDING:
            yield f"{who} weighs sites unequally in its normaliser, by up to {ratio:.3g} times"
        if spec.eps and not math.isclose(_level(read, 1), first, rel_tol=_ROUNDING):
            yield f"{who} has another ratio of eps and normaliser weights than classifier"


def _missing(spec: TransformerSpec) -> Iterator[str]:
    names = [op.name for op in spec.operators]
    depths = list(dict.fromkeys(op.depth for op in spec.operators))
    expected = [f"{kind}_{depth}" for depth in depths for kind in _KINDS]
    for name in expected:
        if name not in names:
            yield f"operators.{name} was removed, and the rest of its layer was not"
    if not names:
        yield "it has no layers left"
    if names != expected:
        yield "its operators are not in the order of attention and MLP"


def _unequal(spec: TransformerSpec) -> Iterator[str]:
    for first, op in zip(spec.operators[:2] * len(spec.operators), spec.operators, strict=False):
        for field, noun in _SHARED.items():
            ours, theirs = getattr(op, field, None), getattr(first, field, None)
            if ours != theirs:
                yield f"operators.{op.name} has {ours:,} {noun}, operators.{first.name} {theirs:,}"
        if isinstance(op, AttentionSpec) and isinstance(first, AttentionSpec):
            if 2 * op.keys != op.values:
                channels = f"{2 * op.keys:,} key and {op.values:,} value channels in a head"
                yield f"operators.{op.name} has {channels}"
            if op.frequencies != first.frequencies:
                yield f"operators.{op.name} has other RoPE frequencies than operators.{first.name}"


def _read(model: Transformer, name: str) -> Extractor:
    part = model.operators[name]
    assert isinstance(part, Operator)
    return part.read


def _weights(read: Extractor) -> Tensor:
    """Of the normaliser: slow ones, or the paper's, which depend on the gain."""
    gain = read.gain.detach().float()
    return gain.square() / gain.square().sum() if read.tied else read.weight.float()


def _level(read: Extractor, width: int) -> float:
    """c times the width, for equal weights c of the normaliser: 1 for RMSNorm of this width.

    x / sqrt(eps + c sum x^2) = (c D)^-0.5 x / sqrt(eps / (c D) + mean x^2).
    """
    level = float(_weights(read).double().mean()) * width
    return 1.0 if math.isclose(level, 1.0, rel_tol=_ROUNDING) else level


def _norm(read: Extractor, width: int, divisor: Tensor | None = None) -> Tensor:
    """The weight of an RMSNorm of this width: the gain, over the divisors if there are any."""
    gain = read.gain if divisor is None else read.gain / divisor
    return widened(gain / math.sqrt(_level(read, width)), 0, width)


def _divides(gain: Tensor, scale: Tensor) -> bool:
    """Whether gain / scale is no larger than half precision holds: a scale may be near zero."""
    return bool((gain.abs() <= _LARGEST_GAIN * scale.abs()).all() and scale.all())


def _rows(pairs: Tensor, interleaved: bool) -> Tensor:
    """A query or key map [D, heads, 2, P] as rows [heads * d_k, D]; see `decoder._pairs`."""
    order = (1, 3, 2, 0) if interleaved else (1, 2, 3, 0)
    return pairs.permute(order).flatten(0, 2)
