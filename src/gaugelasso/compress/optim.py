"""Coupled Muon/Adam on flat storage: task momentum and penalty share one normalisation.

Momentum follows the task gradient alone. rho r is added before the step is
normalised, so the penalty competes in the optimizer's own metric. Reads nothing
back to the host. Knows nothing of axes or targets.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gaugelasso.compress.flat import FlatStore, Segment
from gaugelasso.compress.flat_optimizer import FlatOptimizer, StateVector
from gaugelasso.kernels.dispatch import fused_flat

Kind = Literal["muon", "adam"]

# Quintic of Jordan et al. 2024: brings singular values into about [0.7, 1.2] in so many rounds.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5
# Added to denominators: to a matrix's norm, and to an element's spread.
_TINY_NORM, _TINY = 1e-20, 1e-12
# The launches of one more batch on a GPU, in multiply-adds that could be done in that time.
_BUCKET_COST = 5e9


def newton_schulz(batch: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, approximately; batch [..., rows <= cols].

    Zero rows and columns stay zero, so padding changes nothing.
    """
    x = batch / (batch.norm(dim=(-2, -1), keepdim=True) + _TINY_NORM)
    shape, x = x.shape, x.to(_precision(x)).reshape(-1, *x.shape[-2:])
    return _orthogonal(x).view(shape).to(batch.dtype)


def _precision(tensor: Tensor) -> torch.dtype:
    return torch.bfloat16 if tensor.is_cuda else tensor.dtype


def _orthogonal(x: Tensor) -> Tensor:
    """The iteration, on matrices [count, rows, cols] that are already divided by their norms."""
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        # x <- a x + (b G + c G G) x with G = x x'; each product is fused with its sum.
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@dataclass(frozen=True)
class Grid:
    """The place of one matrix in flat storage, with no more rows than columns."""

    start: int
    shape: tuple[int, int]
    strides: tuple[int, int]

    @classmethod
    def of(cls, segment: Segment, leading: int) -> "Grid":
        """The matrix of a tensor whose `leading` dims are its rows, or its transpose."""
        rows, cols = segment.shape[:leading].numel(), segment.shape[leading:].numel()
        if rows > cols:
            return cls(segment.start, (cols, rows), (1, cols))
        return cls(segment.start, (rows, cols), (cols, 1))

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.start)


class Bucket:
    """Matrices padded to one shape [rows, cols], and their step scales [count, 1, 1].

    Stores no index of their elements, which would take more memory than the elements.
    """

    def __init__(self, grids: list[Grid], like: Tensor):
        # Tensor cores need multiples of 16; zero rows and columns change nothing.
        step = 16 if like.is_cuda else 1
        self.grids = grids
        self.rows, self.cols = (-(-size // step) * step for size in _frame(grids))
        self.scale = like.new_tensor([grid.shape[1] ** 0.5 for grid in grids]).view(-1, 1, 1)
        # [count, 5]: start, numbers of rows and columns, their strides.
        places = [(grid.start, *grid.shape, *grid.strides) for grid in grids]
        self.places = torch.tensor(places, device=like.device)

    def gather(self, flat: Tensor) -> Tensor:
        """The matrices [count, rows, cols], padded with zeros."""
        batch = flat.new_zeros(len(self.grids), self.rows, self.cols)
        for grid, part in zip(self.grids, self._parts(batch), strict=True):
            part.copy_(grid.view(flat))
        return batch

    def scatter_(self, flat: Tensor, batch: Tensor) -> None:
        """Write the matrices of a batch to their places."""
        for grid, part in zip(self.grids, self._parts(batch), strict=True):
            grid.view(flat).copy_(part)

    def _parts(self, batch: Tensor) -> Iterator[Tensor]:
        for grid, part in zip(self.grids, batch, strict=True):
            yield part[: grid.shape[0], : grid.shape[1]]


class MatrixPlan:
    """Muon over every matrix of a store, in few batched products for any shapes."""

    def __init__(self, store: FlatStore, rows_of: Mapping[str, int]):
        self.size = store.matrix_end
        grids: dict[tuple[int, int], list[Grid]] = {}
        for name, leading in rows_of.items():
            if store.segments[name].shape.numel():
                grid = Grid.of(store.segments[name], leading)
                size = _power_of_two(grid.shape[0]), _power_of_two(grid.shape[1])
                grids.setdefault(size, []).append(grid)
        cost = _BUCKET_COST if store.weight.is_cuda else 0.0
        merged = _merged(list(grids.values()), cost)
        self.buckets = [Bucket(group, store.weight) for group in merged]

    def orthogonalise(self, flat: Tensor) -> Tensor:
        """Updates of per-element RMS 1 for the flat matrices."""
        results = torch.empty_like(flat)
        for bucket in self.buckets:
            bucket.scatter_(results, newton_schulz(bucket.gather(flat)) * bucket.scale)
        return results

    def advance_(
        self, weight: Tensor, momentum: Tensor, gradient: Tensor, rho: Tensor, lr: Tensor
    ) -> None:
        """weight -= lr times the update of momentum + rho gradient; all flat."""
        if fused_flat(weight):
            from gaugelasso.kernels.gpu import optim

            for bucket in self.buckets:
                place, kind = (bucket.places, (bucket.rows, bucket.cols)), _precision(weight)
                x = optim.gather(momentum, gradient, rho, *place, kind, _TINY_NORM)
                optim.scatter_(weight, _orthogonal(x), bucket.scale, lr, bucket.places)
            return
        aim = momentum[: self.size] + rho * gradient[: self.size]
        weight[: self.size].sub_(lr * self.orthogonalise(aim))


def _frame(group: list[Grid]) -> tuple[int, int]:
    return max(grid.shape[0] for grid in group), max(grid.shape[1] for grid in group)


def _merged(groups: list[list[Grid]], bucket_cost: float) -> list[list[Grid]]:
    """Merge groups of matrices into one padded batch where that is cheaper than two batches."""

    def cost(rows: int, cols: int, number: int) -> float:
        # Three products per round, and a few passes over memory.
        each = 2 * _ROUNDS * rows**2 * (2 * cols + rows) + 1500 * rows * cols
        return bucket_cost + number * each

    frames = [(*_frame(group), len(group)) for group in groups]
    while len(groups) > 1:
        best, pair = 0.0, None
        for i, j in itertools.combinations(range(len(frames)), 2):
            a, b = frames[i], frames[j]
            both = max(a[0], b[0]), max(a[1], b[1]), a[2] + b[2]
            gain = cost(*a) + cost(*b) - cost(*both)
            if gain > best:
                best, pair, joined = gain, (i, j), both
        if pair is None:
            break
        i, j = pair
        frames[i] = joined
        groups[i] = groups[i] + groups.pop(j)
        frames.pop(j)
    return groups


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class CoupledOptimizer(FlatOptimizer):
    """m <- lerp(m, g, 1 - beta); then a normalised step along m + rho r.

    `muon`: matrices by Newton-Schulz at RMS 1, everything else by
        u = (m^ + rho r) / sqrt(v^ + (rho r)^2), clipped to +-1.
    `adam`: everything by the second formula.
    Weight decay is decoupled, and applies to the elements of the second formula only.
    """

    def __init__(
        self,
        store: FlatStore,
        matrices: Mapping[str, int],
        kind: Kind = "muon",
        beta: float = 0.95,
        beta_second: float = 0.99,
        weight_decay: float = 0.0,
    ):
        self.kind, self.beta, self.beta_second = kind, beta, beta_second
        self.weight_decay = weight_decay
        # beta**t of both averages, on the device so that a step reads no host value.
        self.decay = torch.ones(2, dtype=store.weight.dtype, device=store.weight.device)
        self._rates = self.decay.new_tensor([beta, beta_second])
        self._shares = 1 - self._rates
        super().__init__(store, matrices)
        second = torch.zeros_like(store.weight[self.matrix_end :])
        self.state += [
            StateVector("momentum", torch.zeros_like(store.weight), power=-1),
            StateVector("second", second, power=-2),
        ]

    def attach(self, store: FlatStore, matrices: Mapping[str, int]) -> None:
        """Work on this store from now on; the state must already have the store's layout."""
        super().attach(store, matrices)
        self.matrix_end = store.matrix_end if self.kind == "muon" else 0
        self.plan = MatrixPlan(store, matrices) if self.matrix_end else None

    @property
    def momentum(self) -> Tensor:
        return self.state[0].values

    @property
    def second(self) -> Tensor:
        """The average of squared gradients, of the elements from `matrix_end` on."""
        return self.state[1].values

    def scalars(self) -> dict[str, Tensor]:
        return {"decay": self.decay}

    def observe_(self, sound: Tensor) -> None:
        """Update momentum and second moment by the task gradient, if the step is `sound`."""
        if fused_flat(self.momentum):
            from gaugelasso.kernels.gpu import optim

            betas = self.beta, self.beta_second
            optim.observe_(self.store.grad, self.momentum, self.second, self.decay, sound, betas)
            return
        gradient = self.store.grad.masked_fill_(~sound, 0.0)
        first, second = self._shares * sound
        self.momentum.lerp_(gradient, first)
        tail = gradient[self.matrix_end :]
        self.second.lerp_(tail * tail, second)
        self.decay.mul_(torch.where(sound, self._rates, 1.0))

    def step_(
        self, penalty: Tensor, rho: Tensor, lr: Tensor, elementwise: Tensor | None = None
    ) -> None:
        """One step along m + rho r, where r is the penalty's gradient.

        `elementwise` holds the rates of the elements that are not in matrices; by default lr.
        """
        rates = lr if elementwise is None else elementwise
        weight, end = self.store.weight, self.matrix_end
        if self.plan is not None:
            self.plan.advance_(weight, self.momentum, penalty, rho, lr)
        if fused_flat(weight):
            from gaugelasso.kernels.gpu import optim

            optim.advance_(
                weight, self.momentum, self.second, penalty, rho, self.decay, rates,
                self.weight_decay, _TINY,
            )  # fmt: skip
            # Autograd must detect a later backward pass through the weights before this step.
            increment_version(weight)
            return
        push = rho * penalty[end:]
        # Zero before the first gradient, when there is nothing to divide.
        first, second = (1 - self.decay).clamp(min=_TINY)
        aim = self.momentum[end:] / first + push
        spread = (self.second / second + push * push).sqrt()
        update = (aim / (spread + _TINY)).clamp(-1, 1)
        if self.weight_decay:
            weight[end:].mul_(1 - rates * self.weight_decay)
        weight[end:].sub_(rates * update)
