"""Every fused kernel of the forward pass against its reference: values and gradients.

On a GPU as compiled; elsewhere by Triton's interpreter, where Triton is installed. The stream
has a file of its own, test_stream.py.
"""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.models import AttentionSpec, MlpSpec, Transformer, TransformerSpec
from tests.kernels import CUDA, DEVICE
from tests.kernels.comparison import (
    DTYPES,
    TOLERANCE,
    compare,
    draw,
    draw_indices,
    draw_sites,
    pad,
    trim,
)

triton = pytest.importorskip("triton")

from gaugelasso.kernels import dispatch  # noqa: E402
from gaugelasso.kernels.gpu import entropy, heads, maps, pointwise, stream  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("vocabulary", [11, 150])
def test_embed(placed: bool, vocabulary: int) -> None:
    batch, length, d, size = 3, 17, 70, 75
    tokens = draw_indices(vocabulary, batch, length)
    sites = draw_sites(size, d)

    def run(table: Tensor, scale: Tensor, positions: Tensor, fused: bool) -> Tensor:
        where = positions if placed else None
        arguments = tokens, table, where, scale, sites, size
        x = stream.Embed.apply(*arguments, torch.float32) if fused else kernels.embed(*arguments)
        return x if placed else torch.cat([x.flatten(), 0 * positions.flatten()])

    inputs = [draw(vocabulary, d), draw(d), draw(length + 2, d)]
    compare(lambda *a: run(*a, False), lambda *a: run(*a, True), inputs, TOLERANCE[torch.float32])


@pytest.mark.parametrize("widths", [(7,), (20, 5), (130, 9, 33), (513, 513)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_project(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    d, tokens = 21, 48

    def plain(n: Tensor, gain: Tensor, *weights: Tensor) -> Tensor:
        return kernels.project(n, gain, weights)

    def fused(n: Tensor, gain: Tensor, *weights: Tensor) -> Tensor:
        return trim(maps.Project.apply(pad(n.to(dtype), d), gain, *weights), *widths)

    inputs = [draw(d, tokens), draw(d), *(draw(d, w, seed=i) for i, w in enumerate(widths))]
    compare(plain, fused, inputs, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_deliver(dtype: torch.dtype) -> None:
    def fused(h: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
        return trim(maps.Deliver.apply(pad(h.to(dtype), 130), matrix, scale, 1, 1), 71)

    compare(kernels.deliver, fused, [draw(130, 40), draw(130, 71), draw(71)], TOLERANCE[dtype])


@pytest.mark.parametrize("d_v", [3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_heads(d_v: int, dtype: torch.dtype) -> None:
    """Token-major heads, whose padded channels do not contribute."""
    batch, count, length, d = 2, 3, 10, 13

    def fused(mixed: Tensor, out: Tensor, scale: Tensor) -> Tensor:
        rows = mixed.to(dtype).transpose(1, 2).flatten(2).flatten(0, 1).T
        return trim(maps.Deliver.apply(rows, out.flatten(0, 1), scale, d_v, 8), d)

    mixed = draw(batch, count, length, 8)
    mixed[..., d_v:] = 0
    inputs = [mixed, draw(count, d_v, d), draw(d)]
    compare(kernels.merge_heads, fused, inputs, TOLERANCE[dtype])


@pytest.mark.parametrize("turn", [True, False])
@pytest.mark.parametrize(
    ("count", "groups", "d_k", "d_v"), [(2, 2, 10, 5), (4, 2, 8, 40), (1, 1, 2, 1)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_heads(
    count: int, groups: int, d_k: int, d_v: int, turn: bool, dtype: torch.dtype
) -> None:
    batch, length = 3, 30
    frequencies = draw(d_k // 2, positive=True) if turn else None

    widths = count * d_k, groups * d_k, groups * d_v

    def plain(rows: Tensor) -> list[Tensor]:
        return list(kernels.split_heads(rows, batch, count, groups, d_k, d_v, frequencies))

    def fused(rows: Tensor) -> list[Tensor]:
        q, k, v = heads.SplitHeads.apply(
            pad(rows.to(dtype), *widths), batch, count, groups, d_k, d_v, frequencies
        )
        for part, width in ((q, d_k), (k, d_k), (v, d_v)):
            assert part.shape[-1] % 8 == 0
            assert (part[..., width:] == 0).all()
        q, k, v = q[..., :d_k], k[..., :d_k], v[..., :d_v]
        if turn:  # the halves of a pair are adjacent
            q, k = (t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for t in (q, k))
        return [q, k, v]

    compare(plain, fused, [draw(sum(widths), batch * length)], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    compare(
        kernels.swiglu,
        lambda both: pointwise.Swiglu.apply(both.to(dtype)),
        [draw(14, 333)],
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("feature_major", [True, False])
@pytest.mark.parametrize("classes", [5, 300, 1111])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy(classes: int, feature_major: bool, dtype: torch.dtype) -> None:
    batch, length = 3, 23
    targets = draw_indices(classes, batch, length)
    targets[0, 3:6] = -100

    def lay(logits: Tensor) -> Tensor:
        return logits.T if feature_major else logits

    def run(logits: Tensor, fused: bool) -> Tensor:
        if not fused:
            return kernels.cross_entropy(lay(logits).reshape(batch, length, classes), targets)
        return entropy.CrossEntropy.apply(
            lay(logits.to(dtype)).view(batch, length, classes), targets
        )

    shape = (classes, batch * length) if feature_major else (batch * length, classes)
    logits = [5 * draw(*shape)]
    compare(lambda z: run(z, False), lambda z: run(z, True), logits, TOLERANCE[dtype])


@pytest.mark.parametrize("feature_major", [True, False])
@pytest.mark.parametrize("classes", [5, 300, 1111])
@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cross_entropy(classes: int, feature_major: bool, dtype: torch.dtype) -> None:
    batch, length = 3, 23
    shape = (classes, batch * length) if feature_major else (batch * length, classes)
    teacher = (5 * draw(*shape, seed=1)).to(dtype)
    teacher[0] = float("-inf")  # a class, or all but the first of a token, that is impossible
    if not feature_major:
        teacher[0, 0] = 1.0
    targets = draw_indices(classes, batch, length)
    targets[:, ::3] = kernels.NO_TARGET

    def lay(logits: Tensor) -> Tensor:
        return (logits.T if feature_major else logits).view(batch, length, classes)

    def run(logits: Tensor, fused: bool) -> Tensor:
        if not fused:
            return kernels.soft_cross_entropy(lay(logits), lay(teacher), targets)
        return entropy.SoftCrossEntropy.apply(lay(logits.to(dtype)), lay(teacher), targets)

    logits = [5 * draw(*shape)]
    compare(lambda z: run(z, False), lambda z: run(z, True), logits, TOLERANCE[dtype])


def test_soft_cross_entropy_ignores_what_both_exclude() -> None:
    logits, teacher = draw(1, 3, 5), draw(1, 3, 5, seed=1)
    logits[..., 2] = teacher[..., 2] = -float("inf")
    kept = [0, 1, 3, 4]
    expected = kernels.soft_cross_entropy(logits[..., kept], teacher[..., kept])
    with kernels.reference_kernels():
        assert torch.allclose(kernels.soft_cross_entropy(logits, teacher), expected)
    found = entropy.SoftCrossEntropy.apply(logits, teacher)
    assert torch.allclose(found, expected)
    # Not a bit else where all positions have a target.
    targets = draw_indices(5, 1, 3)
    assert torch.equal(entropy.SoftCrossEntropy.apply(logits, teacher, targets), found)
    with pytest.raises(ValueError, match=r"\(1, 3, 5\) and \(1, 3, 4\)"):
        kernels.soft_cross_entropy(logits, teacher[..., kept])


def test_a_class_out_of_range_gives_nan() -> None:
    logits = draw(1, 3, 5)
    for wrong in (5, -1):
        targets = torch.tensor([[0, wrong, -100]], device=DEVICE)
        assert entropy.CrossEntropy.apply(logits, targets).isnan()


def test_a_token_out_of_range_gives_nan() -> None:
    sites = torch.arange(3, device=DEVICE)
    tokens = torch.tensor([[0, 4]], device=DEVICE)
    table, scale = draw(4, 3), draw(3)
    x = stream.Embed.apply(tokens, table, None, scale, sites, 3, torch.float32)
    assert x[:, 1].isnan().all()
    assert not x[:, 0].isnan().any()


# --- whole models ---------------------------------------------------------------

UNIFORM = {
    "width": 9, "layers": 2, "heads": 2, "d_k": 6, "d_v": 3, "d_f": 5,
    "length": 7, "inputs": 11, "outputs": 13,
}  # fmt: skip
IRREGULAR = TransformerSpec(
    sites=tuple(range(6)), length=8, layers=3, inputs=5, outputs=5, embed=(3,),
    classify=(5, 0, 2),
    operators=(
        AttentionSpec(0, (3,), (5, 1), 2, 1, 3, 1, 0.5, (1.0, 0.1, 0.01)),
        MlpSpec(1, (1, 5, 3), (0,), 1),
        AttentionSpec(2, (0,), (2,), 1, 1, 1, 2, 0.5, (1.0,)),
    ),
)  # fmt: skip
SPECS = {
    "plain": {},
    "one channel": {"width": 1, "heads": 1, "d_k": 2, "d_v": 1, "d_f": 1},
    "short of its positions": {"positions": True, "length": 9},
    "many tokens": {"positions": True, "inputs": 50},
    "grouped keys": {"heads": 6, "kv_heads": 2},
    "odd keys without rotation": {"rope": False, "d_k": 5, "d_v": 7},
    "full attention": {"causal": False},
    "tied norm": {"norm": "tied"},
    "patches": {"input_kind": "patches", "positions": True},
    "wide": {"width": 70, "d_f": 90, "outputs": 300, "d_k": 34, "d_v": 33, "layers": 1},
}


@pytest.fixture
def fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused forms also on a CPU, by the interpreter."""
    names = ("entropy", "heads", "maps", "stream", "swiglu")
    for name in () if CUDA else names:
        module = importlib.import_module(f"gaugelasso.kernels.{name}")
        monkeypatch.setattr(module, "fused", lambda _: not dispatch._plain)


# Fields of the structure that `uniform` does not take.
BIASED: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True},
    "write biases": {"write_bias": True, "head_bias": True},
    "tied head": {"outputs": 11, "tied_head": True},
    "tied head with biases": {
        "outputs": 11,
        "tied_head": True,
        "tied_mean": True,
        "head_bias": True,
    },
    "GELU": {"mlp": "gelu_tanh", "attention_bias": True, "write_bias": True, "head_bias": True},
    "norms of heads": {"qk_norm": True, "eps": 0.01},
}


@pytest.mark.parametrize("name", [*SPECS, *BIASED, "irregular", "windows"])
@pytest.mark.usefixtures("fuse")
def test_whole_models(name: str) -> None:
    spec = TransformerSpec.uniform(**UNIFORM | SPECS.get(name, {}))
    if name == "irregular":
        spec = IRREGULAR
    spec = replace(spec, **BIASED.get(name, {}))
    if name == "windows":
        attentions = [op for op in spec.operators if isinstance(op, AttentionSpec)]
        windowed = {op.name: replace(op, window=3) for op in attentions}
        operators = tuple(windowed.get(op.name, op) for op in spec.operators)
        spec = replace(spec, operators=operators)
    model = Transformer(spec, 1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.to(DEVICE)
    size = (2, 7)
    if spec.input_kind == "patches":
        inputs = draw(*size, spec.inputs)
    else:
        inputs = torch.randint(spec.inputs, size, generator=generator).to(DEVICE)
    targets = torch.randint(spec.outputs, size, generator=generator).to(DEVICE)
    seen = []
    for plain in (True, False):
        model.zero_grad()
        with kernels.reference_kernels(plain):
            outputs = model(inputs)
            loss = kernels.cross_entropy(outputs, targets)
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        energies = [b.clone() for n, b in model.named_buffers() if n.endswith("energy")]
        seen.append([outputs.detach(), loss.detach(), *gradients, *energies])
    largest = max(float(g.abs().max()) for g in seen[0][2:])
    for expected, got in zip(*seen, strict=True):
        assert torch.allclose(got, expected, rtol=1e-3, atol=1e-5 * largest)
