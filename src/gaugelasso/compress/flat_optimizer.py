"""What every optimizer shares: state on flat storage that follows balances, anchors and cuts.

An optimizer is one file with a subclass of `FlatOptimizer`, and a row in `optimizers.OPTIMIZERS`.
It declares its state as a list of `StateVector`s, and nothing else knows what they mean. Knows
nothing of axes, losses or targets.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugelasso.compress.flat import FlatStore, pick

# The largest element of a moving average before a balance, in norms of the last gradient. Averages
# of gradients stay near one norm, so only repeated rescaling reaches this bound.
MEMORY = 1e4


@dataclass
class StateVector:
    """One number for each of the last `len(values)` elements of the flat weight.

    Where a balance multiplies a weight by c, the state is multiplied by c**power: 1 for what is
    like a weight (an average of weights), -1 like a gradient, -2 like a squared gradient.
    """

    name: str
    values: Tensor
    power: int

    def views(self, store: FlatStore) -> dict[str, Tensor]:
        """The state as tensors of the parameters' shapes, for the parameters that it covers."""
        start = len(store) - len(self.values)
        return {
            name: self.values[segment.start - start : segment.end - start].view(segment.shape)
            for name, segment in store.segments.items()
            if segment.start >= start
        }

    def rescale_(self, along: Tensor) -> None:
        """Follow a balance that multiplies each element of the flat weight by `along`."""
        scale_([self.values], [along[len(along) - len(self.values) :]], self.power)

    def follow_cut_(self, kept: Tensor, size: int) -> None:
        """Keep the elements at these ascending positions of a flat weight of the old size."""
        start = size - len(self.values)
        if start:
            first = torch.searchsorted(kept, kept.new_tensor(start))  # no mask of all elements
            kept = kept[int(first) :] - start
        self.values = pick(self.values, kept)

    def bound_(self, norm: Tensor) -> None:
        """|values| <= norm**-power, for state that is like a power of a gradient."""
        if self.power < 0:
            limit = norm**-self.power
            self.values.clamp_(-limit, limit)


def scale_(tensors: list[Tensor], factors: list[Tensor], power: int) -> None:
    """tensor *= factor**power, for each pair. Divides for a negative power: it rounds once."""
    if not power or not tensors:
        return
    raised = factors
    for _ in range(abs(power) - 1):  # products, because a GPU rounds a power differently
        raised = list(torch._foreach_mul(raised, factors))
    apply_ = torch._foreach_mul_ if power > 0 else torch._foreach_div_
    apply_(tensors, raised)


class FlatOptimizer:
    """The base of an optimizer: its store, its state, and how the state follows the structure.

    A subclass fills `state`, and defines `momentum`, `observe_` and `step_`. More vectors may be
    appended to `state` from outside, such as an average of the weights; a checkpoint holds each
    under its name. `matrix_end` is where the elements that are stepped one by one begin.
    """

    def __init__(self, store: FlatStore, matrices: Mapping[str, int]):
        self.state: list[StateVector] = []
        self.attach(store, matrices)

    def attach(self, store: FlatStore, matrices: Mapping[str, int]) -> None:
        """Work on this store from now on; the state must already have the store's layout."""
        self.store = store
        self.matrix_end = 0

    def detach(self) -> None:
        """Release the store. `attach` must follow before anything else."""
        del self.store

    @property
    def momentum(self) -> Tensor:
        """The direction of the task's next step, flat; the penalty's strength depends on it."""
        raise NotImplementedError

    def observe_(self, sound: Tensor) -> None:
        """Take in the task gradient, `store.grad`, unless the step is not `sound`."""
        raise NotImplementedError

    def step_(
        self, penalty: Tensor, rho: Tensor, lr: Tensor, elementwise: Tensor | None = None
    ) -> None:
        """Change the weights along the task's direction and rho times the penalty's gradient.

        `elementwise` holds the rates of the elements from `matrix_end` on; by default lr.
        """
        raise NotImplementedError

    def scalars(self) -> dict[str, Tensor]:
        """State that belongs to no parameter, by the name that a checkpoint gives it."""
        return {}

    def follow_cut_(self, kept: Tensor) -> None:
        """Cut the state like the weights; `attach` the new store afterwards."""
        for vector in self.state:
            vector.follow_cut_(kept, len(self.store))

    def bound_memory_(self) -> None:
        """|m| <= MEMORY ||g|| and v <= (MEMORY ||g||)^2, where g is the last gradient.

        A balance multiplies the averages by 1/c. Where an index's gauge drifts by the same factor
        in every interval, c is the same at every event, and an average that forgets more slowly
        than the gauge drifts would grow geometrically although the gradients do not.
        """
        norm = self.store.grad.norm()
        # Without a gradient since the last change of structure there is no bound.
        limit = torch.where(norm > 0, MEMORY * norm, torch.inf)
        for vector in self.state:
            vector.bound_(limit)

    def states(self) -> dict[str, dict[str, Tensor]]:
        """The state as tensors by name, for checkpoints."""
        return {vector.name: vector.views(self.store) for vector in self.state}
