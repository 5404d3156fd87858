"""In the interpreter, an access outside the tensors of a kernel is an error.

On a GPU it would often read or overwrite another tensor without an error.
"""

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gaugelasso.kernels import dispatch
from tests.kernels import CUDA

# Kernels that take addresses of further tensors, whose bounds are unknown.
_ANYWHERE = {"_follow"}


class Bounds:
    """The memory of some tensors, as disjoint ranges of addresses."""

    def __init__(self, tensors: Iterable[Tensor] = (), anywhere: bool = False):
        self._anywhere = anywhere
        ranges: list[list[int]] = []
        for start, end in sorted(_extent(tensor) for tensor in tensors if tensor.numel()):
            if ranges and start <= ranges[-1][1]:
                ranges[-1][1] = max(end, ranges[-1][1])
            else:
                ranges.append([start, end])
        self._starts, self._ends = np.array(ranges, np.uint64).reshape(-1, 2).T

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        """AssertionError if an unmasked pointer is outside; arguments are the interpreter's."""
        addresses, chosen = np.broadcast_arrays(pointers.data, mask.data)
        addresses = addresses[chosen.astype(bool)]
        if self._anywhere or not addresses.size:
            return
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        run = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        inside = (run >= 0) & (addresses + size <= self._ends[run])
        assert inside.all(), f"{what} outside of every tensor, {(~inside).sum()} of {inside.size}"


def _extent(tensor: Tensor) -> tuple[int, int]:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


@pytest.fixture(autouse=True)
def _in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    if CUDA or not importlib.util.find_spec("triton"):
        return
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    given, bounds = executor._init_args_hst, Bounds()
    load, store = builder.create_masked_load, builder.create_masked_store
    atomic = builder.create_atomic_rmw

    def take(self: Any, arguments: Any, named: Any) -> Any:
        nonlocal bounds
        taken = given(self, arguments, named)
        every = (interpreter._unwrap_tensor(x) for x in (*taken[0], *taken[1].values()))
        tensors = [x for x in every if isinstance(x, torch.Tensor)]
        bounds = Bounds(tensors, anywhere=self.fn.__name__ in _ANYWHERE)
        return taken

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        bounds.check("read", pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        bounds.check("written", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def checked_atomic(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        bounds.check("changed", pointers, mask)
        return atomic(self, op, pointers, value, mask, *rest)

    monkeypatch.setattr(executor, "_init_args_hst", take)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
    monkeypatch.setattr(builder, "create_atomic_rmw", checked_atomic)


@pytest.fixture
def fused_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused forms wherever they are asked for, also by the interpreter on a CPU."""
    for name in () if CUDA else ("gauge", "optim", "step_scalars", "penalty"):
        module = importlib.import_module(f"gaugelasso.compress.{name}")
        monkeypatch.setattr(module, "fused_flat", lambda _: not dispatch._plain)
