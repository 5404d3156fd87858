"""In the interpreter, an access outside the tensors of a kernel is an error: see `bounds`."""

import importlib
import importlib.util
from collections.abc import Iterator

import pytest

from gaugelasso.kernels import dispatch
from tests.kernels import CUDA
from tests.kernels.bounds import in_bounds


@pytest.fixture(autouse=True)
def _in_bounds() -> Iterator[None]:
    if CUDA or not importlib.util.find_spec("triton"):
        yield
        return
    with in_bounds():
        yield


@pytest.fixture
def fused_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused forms wherever they are asked for, also by the interpreter on a CPU."""
    for name in () if CUDA else ("gauge", "optim", "step_scalars", "penalty"):
        module = importlib.import_module(f"gaugelasso.compress.{name}")
        monkeypatch.setattr(module, "fused_flat", lambda _: not dispatch._plain)
