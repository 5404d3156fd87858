"""The fused stream against its reference: reads, writes, gradients that are added in place.

On a GPU as compiled; elsewhere by Triton's interpreter, where Triton is installed. The stress
test needs a GPU and takes about a minute:

    python -m pytest tests/kernels/test_stream.py -m gpu
"""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from gaugelasso import kernels
from tests.kernels import CUDA, DEVICE
from tests.kernels.comparison import (
    assert_close,
    draw,
    draw_sites,
    outputs_and_gradients,
    pad,
    trim,
)

pytest.importorskip("triton")

from gaugelasso.kernels.gpu import stream

# The interpreter truncates bfloat16 instead of rounding it.
HALF = torch.bfloat16 if CUDA else torch.float16
# Half-precision roundings on the longest path through two operators. Each operator rounds u, n
# and u n; then the gradient of u n, its product with u, its sum with the gradient of n, and both
# factors n of the normaliser's gradient.
ROUNDINGS = 16
# Each rounding has an error of at most eps / 2, with a standard deviation below 0.3 eps. So the
# error of all is within three deviations.
TOLERANCE = {torch.float32: 2e-5} | {
    dtype: ROUNDINGS**0.5 * torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)
}
EPS = 1e-20
REPETITIONS = 2000

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
compiled = pytest.mark.skipif(not CUDA, reason="no CUDA device")


@dataclass
class Chain:
    """Two operators in a row: x, n = read(x), then x = write(x, u n)."""

    reads: list[Tensor]
    writes: list[Tensor]
    weight: Tensor
    dtype: torch.dtype
    eps: float = 0.0
    by_token: bool = False

    @classmethod
    def of(cls, size: int, dtype: torch.dtype, seed: int = 0, **settings: Any) -> "Chain":
        sites = [draw_sites(size + 3, size, seed=4 * seed + k) for k in range(4)]
        weight = draw(size, positive=True, seed=seed)
        return cls(sites[:2], sites[2:], weight, dtype, **settings)

    def run(self, form: Literal["plain", "terms", "fused"], inputs: list[Tensor]) -> list[Tensor]:
        """The stream and all n, the gradients, and the energies; or a bound of their terms."""
        size = len(self.weight)
        energies = [torch.zeros(size, device=DEVICE) for _ in self.reads]

        def forward(x0: Tensor, *us: Tensor) -> Tensor:
            x, read, magnitude = x0 * 1.0, [], x0.detach().abs()
            for sites, targets, u, energy in zip(
                self.reads, self.writes, us, energies, strict=True
            ):
                if form == "fused":
                    record = energy, self.by_token
                    x, n = stream.Read.apply(
                        x, self.weight, sites, *record, self.eps, EPS, self.dtype
                    )
                    n = trim(n, size)
                    x = stream.Write.apply(x, targets, pad(u.to(self.dtype) * n, size))
                else:
                    x, n = kernels.read(x, sites, self.weight, energy, self.eps, self.by_token)
                    if form == "terms":
                        n = self._detached(x, sites)
                        squares = n.detach() if self.by_token else magnitude[sites]
                        energy.copy_(squares.square().mean(dim=1))
                        magnitude[targets] += (u * n).detach().abs()
                    x = kernels.write(x, targets, u * n)
                read.append(n.float())
            return torch.cat([x, *read])

        with kernels.reference_kernels(form != "fused"):
            results = outputs_and_gradients(forward, inputs)
        return [*results, *energies]

    def _detached(self, x: Tensor, sites: Tensor) -> Tensor:
        """n without a gradient through the normaliser: one of its gradient's two terms."""
        picked = x.index_select(0, sites)
        level = (self.weight[:, None] * picked.detach().square()).sum(dim=0)
        return picked * (level + self.eps).rsqrt()

    def check(self, inputs: list[Tensor]) -> list[Tensor]:
        """Assert that errors are small relative to the terms of a result; the fused results.

        The gradient of a normaliser is a difference of two terms, which may cancel: with a
        single site it is zero. Rounding leaves an error in proportion to the terms. Likewise,
        what is written to a site may cancel its value, and so its energy.
        """
        plain, terms, fused = (self.run(form, inputs) for form in ("plain", "terms", "fused"))
        assert_close(plain, fused, terms, TOLERANCE[self.dtype])
        return fused


@pytest.mark.parametrize(("size", "tokens"), [(70, 100), (5, 33), (64, 32), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("eps", "by_token"), [(0.0, False), (0.5, False), (0.5, True)])
def test_gradients_of_two_operators_are_added_in_place(
    size: int, tokens: int, dtype: torch.dtype, eps: float, by_token: bool
) -> None:
    inputs = [draw(size + 3, tokens), draw(size, tokens, seed=1), draw(size, tokens, seed=2)]
    Chain.of(size, dtype, eps=eps, by_token=by_token).check(inputs)


@pytest.mark.parametrize("first_read", range(4))
def test_a_single_site_wherever_it_is_read_and_written(first_read: int) -> None:
    """All choices of sites, because some of them cancel much and others little."""
    inputs = [draw(4, 1), draw(1, 1, seed=1), draw(1, 1, seed=2)]
    for rest in itertools.product(range(4), repeat=3):
        sites = [torch.tensor([site], device=DEVICE) for site in (first_read, *rest)]
        Chain(sites[:2], sites[2:], draw(1, positive=True), HALF).check(inputs)


def test_silent_tokens_stay_silent() -> None:
    x = draw(6, 40)
    x[:, 5:9] = 0
    sites = torch.arange(6, device=DEVICE)
    leaf = x.clone().requires_grad_()
    weight, energy = draw(6, positive=True), torch.empty(6, device=DEVICE)
    _, n = stream.Read.apply(leaf * 1.0, weight, sites, energy, True, 0.0, EPS, x.dtype)
    n = trim(n, 6)
    n.sum().backward()
    assert (n[:, 5:9] == 0).all()
    assert torch.allclose(energy, n.detach().square().mean(1))
    assert leaf.grad is not None
    assert (leaf.grad[:, 5:9] == 0).all()
    assert leaf.grad.isfinite().all()


# --- stress -------------------------------------------------------------------------------


def well_conditioned(size: int, tokens: int, seed: int) -> list[Tensor]:
    """Inputs for which no write cancels what it is added to: |x| >= 1 and |u n| < 1/2."""
    x = draw(size + 3, tokens, seed=seed)
    us = [0.15 * draw(size, tokens, seed=seed + k).tanh() for k in (1, 2)]
    return [x + x.sign(), *us]


def fill_free_memory(size: int, tokens: int) -> None:
    """Leave NaN in blocks of the allocator that the next tensors of this size will get."""
    for count in ((size + 3) * tokens, 8 * tokens, tokens, size):
        blocks = [torch.full((count,), torch.nan, device=DEVICE) for _ in range(16)]
        del blocks


@compiled
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_other_work_on_the_gpu_changes_no_bit(dtype: torch.dtype) -> None:
    """Many seeds and shapes, on an idle GPU and beside another stream that keeps it busy.

    A race, a missing mask or a read of uninitialised memory would show as other bits. An
    error of rounding would not: the kernels use no atomics.
    """
    shapes = [(1, 1), (5, 33), (64, 32), (70, 100), (200, 1000)]
    other = torch.cuda.Stream()
    matrix = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    for seed in range(REPETITIONS):
        size, tokens = shapes[seed % len(shapes)]
        chain, inputs = Chain.of(size, dtype, seed), well_conditioned(size, tokens, seed)
        fill_free_memory(size, tokens)
        torch.cuda.synchronize()
        idle = chain.check(inputs)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            for _ in range(8):
                matrix @ matrix
        fill_free_memory(size, tokens)
        busy = chain.run("fused", inputs)
        assert all(torch.equal(a, b) for a, b in zip(idle, busy, strict=True)), (seed, size, tokens)
    torch.cuda.synchronize()
