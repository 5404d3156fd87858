"""Further figures: what a task may say of a finished model beside loss and metric."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from gaugelasso.tasks.streams import Draw

# Inputs -> outputs of a model in evaluation mode, in the run's precision, without gradients.
Predict = Callable[[Tensor], Tensor]


@runtime_checkable
class WithFigures(Protocol):
    """A task with figures that are worth their time once, at the end of a run."""

    def final_figures(
        self, predict: Predict, size: int, draws: Sequence[Draw], device: str
    ) -> dict[str, float]:
        """Name -> value. `size`, each of `draws` (held out) and `device` are as in `batch`."""


@runtime_checkable
class WithEnd(Protocol):
    """A task whose held-out data may have an end: it can then be measured on all of it."""

    @property
    def has_end(self) -> bool:
        """Whether it has, as this task is set."""

    def whole_figures(self, predict: Predict, size: int, device: str) -> dict[str, float]:
        """Name -> value over all held-out data, loss and metric among them.

        Asked only of what has an end; `size` and `device` are as in `batch`.
        """
