"""The fused attention of narrow heads against the reference: values, gradients and layouts.

On a GPU as compiled; elsewhere by Triton's interpreter, where Triton is installed.
"""

import pytest
import torch
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.kernels import heads as front
from tests.kernels import CUDA, DEVICE

pytest.importorskip("triton")

from gaugelasso.kernels.gpu import attention
from gaugelasso.kernels.gpu.heads import _is_aligned

# The interpreter cannot multiply bfloat16.
HALF = torch.bfloat16 if CUDA else torch.float16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SCALE = 0.3

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
compiled = pytest.mark.skipif(not CUDA, reason="no CUDA device")


def draw(count: int, length: int, wide: int, *, batch: int = 1, seed: int = 0) -> Tensor:
    """Heads [B, count, S, wide] in token-major memory."""
    generator = torch.Generator().manual_seed(seed + length + wide)
    values = torch.randn(batch, length, count, wide, generator=generator)
    return values.to(DEVICE).transpose(1, 2)


def gradients(out: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def check(q: Tensor, k: Tensor, v: Tensor, causal: bool, dtype: torch.dtype) -> None:
    """Errors relative to the expected values, or to a tenth of the largest if these cancel."""
    grad = draw(q.shape[1], q.shape[2], v.shape[3], batch=len(q), seed=9)
    leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    with kernels.reference_kernels():
        out = kernels.attend(*(t.float() for t in leaves), SCALE, causal)
    expected = gradients(out[..., : v.shape[3]], leaves, grad)
    got = gradients(attention.Attend.apply(*leaves, SCALE, causal), leaves, grad)
    largest = max(float(t.abs().max()) for t in expected)
    for number, (right, ours) in enumerate(zip(expected, got, strict=True)):
        assert ours.shape == right.shape
        assert ours.dtype == dtype
        error = float((ours.float() - right.float()).abs().max())
        size = max(float(right.abs().max()), 0.1 * largest)
        assert error <= TOLERANCE[dtype] * size, (number, error, size)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("batch", "length", "count", "groups", "wide_k", "wide_v", "dtype"),
    [
        (2, 1, 1, 1, 8, 8, torch.float32),
        (1, 7, 4, 1, 16, 8, torch.float32),
        (1, 64, 2, 1, 24, 16, torch.float32),
        (1, 100, 1, 1, 32, 32, torch.float32),
        (1, 155, 1, 1, 8, 8, torch.float32),
        (1, 65, 1, 1, 40, 48, torch.float32),
        (2, 100, 4, 2, 24, 16, torch.float32),
        (1, 100, 2, 1, 24, 16, HALF),
        (1, 129, 1, 1, 40, 48, HALF),
    ],
)
def test_values_and_gradients(
    batch: int, length: int, count: int, groups: int, wide_k: int, wide_v: int,
    dtype: torch.dtype, causal: bool,
) -> None:  # fmt: skip
    q = draw(count, length, wide_k, batch=batch)
    k = draw(groups, length, wide_k, batch=batch, seed=1)
    v = draw(groups, length, wide_v, batch=batch, seed=2)
    check(q, k, v, causal, dtype)


@pytest.mark.parametrize("queries", [32, 128])
def test_tiles_of_other_shapes(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of queries that are shorter or longer than those of keys."""
    for name in ("FORWARD", "D_QUERIES", "D_KEYS"):
        monkeypatch.setattr(attention, name, (queries, 64))
    q, k, v = (draw(1, 130, 8, seed=seed) for seed in range(3))
    for causal in (True, False):
        check(q, k, v, causal, torch.float32)


def test_nothing_leaks_from_beyond_the_sequence() -> None:
    """Scores so low that a zero key in the padding of a tile would outweigh all others.

    With even lower scores, the sums of tensor cores could not distinguish them.
    """
    q, k, v = (draw(1, 70, 8, seed=seed) for seed in range(3))
    q[..., 0], k[..., 0] = 10.0, -10.0
    for causal in (True, False):
        check(q, k, v, causal, torch.float32)


def test_inputs_of_any_layout() -> None:
    q = draw(2, 20, 16).contiguous()
    k = draw(2, 20, 40)[..., 8:24]
    v = draw(2, 20, 8).mT.contiguous().mT
    check(q, k, v, True, torch.float32)
    leaf = q.requires_grad_()
    attention.Attend.apply(leaf, k, v, SCALE, True).sum().backward()  # a gradient with zero strides
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_results_are_token_major() -> None:
    """So merging heads and using the gradients needs no copies."""
    leaves = [t.requires_grad_() for t in (draw(4, 20, 16), draw(2, 20, 16), draw(2, 20, 8))]
    out = attention.Attend.apply(*leaves, SCALE, True)
    assert out.transpose(1, 2).flatten(2).flatten(0, 1).data_ptr() == out.data_ptr()
    for grad in torch.autograd.grad(out, leaves, out.detach()):
        assert grad.transpose(1, 2).is_contiguous()
        assert _is_aligned(grad)


def test_wide_heads_use_the_attention_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "fused", lambda _: True)
    for wide, ours in ((front.NARROW, True), (front.NARROW + 8, False)):
        q, k = (draw(count, 10, wide).requires_grad_() for count in (4, 2))
        mixed = kernels.attend(q, k, k, SCALE, True)
        assert mixed.shape == q.shape
        assert mixed.grad_fn is not None
        assert mixed.grad_fn.name().startswith("Attend") == ours


@compiled
@pytest.mark.gpu
def test_a_new_width_needs_no_compilation() -> None:
    names = ("_forward", "_back_queries", "_back_keys")

    def variants() -> int:
        device = torch.cuda.current_device()
        return sum(len(getattr(attention, name).device_caches[device][0]) for name in names)

    counts = []
    for wide_k, wide_v, length, count in ((24, 24, 40, 4), (32, 32, 64, 2), (32, 24, 1, 6)):
        q, k, v = (draw(n, length, w) for n, w in ((count, wide_k), (2, wide_k), (2, wide_v)))
        leaf = q.bfloat16().requires_grad_()
        attention.Attend.apply(leaf, k.bfloat16(), v.bfloat16(), SCALE, True).sum().backward()
        counts.append(variants())
    assert counts[0] == counts[1] == counts[2]


@compiled
@pytest.mark.gpu
def test_results_are_deterministic() -> None:
    leaves = [draw(n, 300, 24, batch=16).bfloat16().requires_grad_() for n in (4, 2, 2)]
    runs = []
    for _ in range(2):
        out = attention.Attend.apply(*leaves, SCALE, True)
        runs.append(gradients(out, leaves, out.detach()))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
