"""Parts of an update in their plain and in their fused form."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gaugelasso import kernels
from tests.kernels import CUDA, DEVICE

NAN, INF = float("nan"), float("inf")
# Tests of parts of an update: fused also on a CPU, where the interpreter warns.
MARKS = [
    pytest.mark.usefixtures("fused_updates"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
    ),
]
# How near updates of matrices are, in terms of the largest: Newton-Schulz takes small differences
# along, and on a GPU reckons in bfloat16.
ORTHOGONAL = 5e-2 if CUDA else 1e-4


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


@torch.no_grad()
def both(work: Callable[[], list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """What `work`, from the same start, returns in its plain and in its fused form."""
    results = []
    for plain in (True, False):
        with kernels.reference_kernels(plain):
            results.append([tensor.clone() for tensor in work()])
    return list(zip(*results, strict=True))


def near(plain: Tensor, fused: Tensor, share: float = 1e-5) -> None:
    """As near as the order of a sum allows, and no number where the other is none."""
    assert plain.dtype == fused.dtype
    size = plain.float().nan_to_num(0, 0, 0).abs().max() if plain.numel() else 0
    assert torch.allclose(fused, plain, rtol=share, atol=share * float(size), equal_nan=True)
