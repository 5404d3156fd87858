"""In the interpreter, an access outside the tensors of a kernel is an error.

On a GPU it would often read or overwrite another tensor without an error.
"""

import inspect
import random
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

Range = tuple[int, int]
# Programs of each dimension of a grid that are run where a few are enough.
FEW = 6


class Bounds:
    """Ranges of addresses, of tensors and others, as disjoint ones."""

    def __init__(self, tensors: Iterable[Tensor] = (), more: Iterable[Range] = ()):
        ranges: list[list[int]] = []
        extents = [_extent(tensor) for tensor in tensors if tensor.numel()]
        for start, end in sorted([*extents, *more]):
            if ranges and start <= ranges[-1][1]:
                ranges[-1][1] = max(end, ranges[-1][1])
            else:
                ranges.append([start, end])
        self._starts, self._ends = np.array(ranges, np.uint64).reshape(-1, 2).T

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        """AssertionError if an unmasked pointer is outside; arguments are the interpreter's."""
        addresses, chosen = np.broadcast_arrays(pointers.data, mask.data)
        addresses = addresses[chosen.astype(bool)]
        if not addresses.size:
            return
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        run = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        inside = (run >= 0) & (addresses + size <= self._ends[run])
        assert inside.all(), f"{what} outside of every tensor, {(~inside).sum()} of {inside.size}"


def _extent(tensor: Tensor) -> Range:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _addressed(name: str, tensors: Sequence[Tensor]) -> list[Range]:
    """What a kernel reaches by addresses that it reads: `_follow`, float32 of given sizes."""
    if name != "_follow":
        return []
    addresses, sizes = tensors[0].tolist(), tensors[1].tolist()
    return [(at, at + 4 * size) for row in addresses for at, size in zip(row, sizes, strict=True)]


@contextmanager
def in_bounds(few: bool = False) -> Iterator[dict[str, int]]:
    """Within it every access is checked; gives the launches of each kernel.

    With `few`, only the first, the last and some other programs of a launch are run, so results
    mean nothing. Kernels whose programs wait for each other are run in full.
    """
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    given, bounds = executor._init_args_hst, Bounds()
    load, store = builder.create_masked_load, builder.create_masked_store
    atomic = builder.create_atomic_rmw
    launches: dict[str, int] = {}

    def take(self: Any, arguments: Any, named: Any) -> Any:
        nonlocal bounds
        taken = given(self, arguments, named)
        every = (interpreter._unwrap_tensor(x) for x in (*taken[0], *taken[1].values()))
        tensors = [x for x in every if isinstance(x, torch.Tensor)]
        name = self.fn.__name__
        bounds = Bounds(tensors, _addressed(name, tensors))
        launches[name] = launches.get(name, 0) + 1
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_init_args_hst", take)
        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        patch.setattr(builder, "create_atomic_rmw", checked_atomic)
        if few:
            patch.setattr(executor, "__call__", _with_few_programs(interpreter))
        yield launches


def _with_few_programs(interpreter: Any) -> Any:
    """A launch of the interpreter, over some of the programs."""
    source = textwrap.dedent(inspect.getsource(interpreter.GridExecutor.__call__))
    for dimension in range(3):
        every = f"range(grid[{dimension}])"
        assert every in source
        source = source.replace(every, f"_some(self.fn, grid[{dimension}])")
    space = {**vars(interpreter), "_some": _some}
    exec(source, space)
    return space["__call__"]


def _some(kernel: Any, programs: int) -> Sequence[int]:
    if programs <= FEW or kernel.__module__.endswith(".whole"):
        return range(programs)
    draw = random.Random(programs)
    others = (draw.randrange(programs) for _ in range(FEW - 4))
    return sorted({0, 1, programs - 2, programs - 1, *others})
