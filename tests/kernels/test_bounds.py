"""The bounds check of conftest.py finds accesses outside a tensor."""

import pytest
import torch

from tests.kernels import CUDA

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def _double(x, out, count, REACH: "tl.constexpr", WRITTEN: "tl.constexpr"):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 16)
    read = tl.load(x + at, mask=at < count + REACH, other=0.0)
    tl.store(out + at, 2 * read, mask=at < count + WRITTEN)


@pytest.mark.skipif(CUDA, reason="checks the interpreter")
@pytest.mark.parametrize(("reach", "written", "access"), [(1, 0, "read"), (0, 1, "written")])
def test_one_element_beyond_is_found(reach: int, written: int, access: str) -> None:
    x, out = torch.randn(2, 8)[0], torch.zeros(2, 8)[0]  # the memory after them is not part of them
    _double[(1,)](x, out, 8, 0, 0)
    assert torch.equal(out, 2 * x)
    with pytest.raises(Exception, match=f"{access} outside of every tensor, 1 of 9"):
        _double[(1,)](x, out, 8, reach, written)
