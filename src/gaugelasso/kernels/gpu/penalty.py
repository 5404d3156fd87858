"""Group norms, the penalty's gradient and bounded learning rates: one pass each."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gaugelasso.kernels.gpu.flat import BLOCK, blocks

# Members of a group that are added at a time. Groups have a hundred to many thousand members.
_MEMBERS = 2048


@triton.jit
def _norms(weight, members, ends, norms, MEMBERS: tl.constexpr):
    group = tl.program_id(0)
    end = tl.load(ends + group + 1)
    total = tl.zeros((MEMBERS,), tl.float32)
    for start in range(tl.load(ends + group), end, MEMBERS):
        k = start + tl.arange(0, MEMBERS)
        i = tl.load(members + k, mask=k < end, other=0)
        v = tl.load(weight + i, mask=k < end, other=0.0)
        total += v * v
    # sqrt_rn, because the approximate root flushes tiny norms to zero.
    tl.store(norms + group, tl.sqrt_rn(tl.sum(total)))


@triton.jit
def _pull(strength, norms, ids, i, live, tiny):
    group = tl.load(ids + i, mask=live, other=0)
    norm = tl.load(norms + group, mask=live, other=0.0)
    pull = tl.load(strength + group, mask=live, other=0.0)
    return tl.where(norm > tiny, pull / tl.maximum(norm, tiny), 0.0)


@triton.jit(
    do_not_specialize=["N"], do_not_specialize_on_alignment=["weight", "ids0", "ids1", "out"]
)
def _gradient(weight, strength, norms, ids0, ids1, out, N, tiny,
              COUNT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < N
    factor = _pull(strength, norms, ids0, i, live, tiny)
    if COUNT > 1:
        factor += _pull(strength, norms, ids1, i, live, tiny)
    tl.store(out + i, factor * tl.load(weight + i, mask=live, other=0.0), mask=live)


@triton.jit
def _lesser(a, b):
    """Propagates NaN: a group with a NaN norm must not get the full learning rate."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rate(norms, roots, ids, i, live, lr, none, bound, least):
    group = tl.load(ids + i, mask=live, other=0)
    norm = tl.load(norms + group, mask=live, other=0.0)
    root = tl.load(roots + group, mask=live, other=1.0)
    rate = _lesser(lr, bound * norm / root)
    rate = tl.maximum(rate, least * lr, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(group == none, lr, rate)


@triton.jit(
    do_not_specialize=["N", "start", "none"],
    do_not_specialize_on_alignment=["ids0", "ids1", "out"],
)
def _rates(norms, roots, ids0, ids1, lr, out, N, start, none, bound, least,
           COUNT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = start + k
    live = i < N
    speed = tl.load(lr)
    rate = _rate(norms, roots, ids0, i, live, speed, none, bound, least)
    if COUNT > 1:
        rate = _lesser(rate, _rate(norms, roots, ids1, i, live, speed, none, bound, least))
    tl.store(out + k, rate, mask=live)


def _two(ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The first and the second group of every element; the second is unused if there is none."""
    assert 1 <= len(ids) <= 2
    return ids[0], ids[-1]


def norms(weight: Tensor, members: Tensor, ends: Tensor) -> Tensor:
    """Frobenius norm of every group; group g is weight[members[ends[g] : ends[g + 1]]]."""
    result = weight.new_empty(len(ends) - 1)
    _norms[(len(result),)](weight, members, ends, result, _MEMBERS)
    return result


def gradient(
    weight: Tensor, strength: Tensor, norms: Tensor, ids: Sequence[Tensor], tiny: float
) -> Tensor:
    """sum over an element's groups of strength / norm, times the element."""
    result, size = torch.empty_like(weight), weight.numel()
    _gradient[blocks(size)](
        weight, strength, norms, *_two(ids), result, size, tiny, len(ids), BLOCK
    )
    return result


def bounded_rate(
    norms: Tensor,
    roots: Tensor,
    ids: Sequence[Tensor],
    lr: Tensor,
    bound: float,
    least: float,
    start: int,
) -> Tensor:
    """min over an element's groups of lr, bounded; the last group bounds nothing."""
    size, none = len(ids[0]), len(norms) - 1
    result = norms.new_empty(size - start)
    _rates[blocks(len(result))](
        norms, roots, *_two(ids), lr, result, size, start, none, bound, least, len(ids), BLOCK
    )
    return result
