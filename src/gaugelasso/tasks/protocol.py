"""The task protocol: what the trainer asks of a task, and which batch it asks for.

Batches are a function of (run seed, stream, index). So a resumed run sees the batches it would
have seen, and held-out data never meets training data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from gaugelasso.models import InputKind

TRAINING, EVALUATION = 0, 1
# Inputs -> outputs of a model in evaluation mode, in the run's precision, without gradients.
Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Draw:
    """Batch `index` of a stream of the run with seed `run`.

    A task that draws from a distribution needs `seed` alone. One over finite data keeps
    to the part that `held_out` names, and may go through it in the order of `index`.
    """

    run: int
    index: int = 0
    stream: int = TRAINING

    @property
    def seed(self) -> int:
        """63 bits of its own."""
        state = np.random.SeedSequence([self.run, self.stream, self.index])
        return int(state.generate_state(1, np.uint64)[0] >> np.uint64(1))

    @property
    def held_out(self) -> bool:
        return self.stream == EVALUATION


class Task(Protocol):
    """A source of batches and the loss and metric of a model's outputs on them.

    A task is a frozen dataclass whose fields are the keys of a config's [task]
    section. Batches are a function of their arguments alone, and lie on the device.
    One that has more to say of a finished model is also a `WithFigures`; one over finite
    data a `WithEnd`; one over stored data, which somebody may change, a `WithData`.
    """

    metric_name: str
    metric_lower_is_better: bool
    input_kind: InputKind
    causal: bool

    @property
    def inputs(self) -> int:
        """Vocabulary or patch size."""

    @property
    def outputs(self) -> int:
        """Classes or pixels."""

    @property
    def length(self) -> int:
        """Positions in a sequence."""

    def batch(self, size: int, draw: Draw, device: str) -> tuple[Tensor, Tensor]:
        """Inputs and targets; the same for the same arguments."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss, a 0-dim tensor."""

    def metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean metric, a 0-dim tensor. Nothing is decided by it: it may be an error or a score."""


@runtime_checkable
class Illustrated(Protocol):
    """What a task may offer besides: something to look at when a run has ended."""

    def samples(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """By name, images [n, h, w, 3] uint8 of a held-out batch; empty for none.

        The report shows one row of images for every name.
        """


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


@runtime_checkable
class WithData(Protocol):
    """A task over stored data, which must be the same for as long as a run goes on."""

    def stored_data(self) -> Mapping[str, np.ndarray]:
        """By a name that tells users which they are, the data; empty where none are stored."""
