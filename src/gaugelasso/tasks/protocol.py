"""The task protocol: what a task provides, and the draw that names a batch.

A batch is a function of (run seed, stream, index). So a resumed run gets the batches that an
uninterrupted run gets, and held-out data never overlap training data. There are two held-out
streams, so that the data that decide (when to anneal again, which checkpoint to keep) are not
the data that the final figure is measured on.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from gaugelasso.models import InputKind

# The streams: gradients; evaluations that decide something; the final figure and nothing else.
TRAINING, SELECTION, TEST = 0, 1, 2
EVALUATION = SELECTION  # its name when there was one held-out stream
# Inputs -> outputs of a model in evaluation mode, in the run's precision, without gradients.
Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Draw:
    """Batch `index` of a stream of the run with seed `run`.

    A task that samples from a distribution needs `seed` alone: the streams are independent
    samples. A task over finite data keeps the streams to parts that do not overlap, and may go
    through a part in the order of `index`.
    """

    run: int
    index: int = 0
    stream: int = TRAINING

    @property
    def seed(self) -> int:
        """63 bits, different for every (run, stream, index)."""
        state = np.random.SeedSequence([self.run, self.stream, self.index])
        return int(state.generate_state(1, np.uint64)[0] >> np.uint64(1))

    @property
    def held_out(self) -> bool:
        return self.stream in (SELECTION, TEST)


class Task(Protocol):
    """A source of batches, and the loss and metric of a model's outputs on them.

    A task is a frozen dataclass whose fields are the keys of a config's [task] section.
    Batches are a function of their arguments alone, and are on the device. The built-in
    transformer needs a `SequenceTask`; a model of your own does not. Optional protocols:
    `WithBestMetric` for a metric with a bound, `WithFigures` for further figures of a finished
    model, `WithEnd` for finite held-out data, `WithData` for stored data that may change between
    runs, `WithFiles` for files of a tokenizer, `Illustrated` for pictures.
    """

    metric_name: str
    metric_lower_is_better: bool

    def batch(self, size: int, draw: Draw, device: str) -> tuple[Tensor, Tensor]:
        """Inputs and targets; the same for the same arguments."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss, a 0-dim tensor."""

    def metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean metric, a 0-dim tensor; an error or a score. It is reported and decides nothing."""


@runtime_checkable
class SequenceTask(Task, Protocol):
    """A task over sequences, with what the built-in transformer needs to know of it."""

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


def positions(task: Task) -> int:
    """Positions in one example of a batch; 1 if the task has no sequences."""
    return task.length if isinstance(task, SequenceTask) else 1


def members(protocol: type) -> list[str]:
    """The names that a protocol itself declares, in the order of its source."""
    declared = [*inspect.get_annotations(protocol), *vars(protocol)]
    return [name for name in declared if not name.startswith("_")]


@runtime_checkable
class Illustrated(Protocol):
    """A task with pictures for the report of a finished run."""

    def samples(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """Name -> images [n, h, w, 3] uint8 of a held-out batch; may be empty.

        The report shows one row of images for every name.
        """


@runtime_checkable
class WithBestMetric(Protocol):
    """A task whose metric has a best value, as an accuracy has: a target beyond it is refused."""

    metric_best: float


@runtime_checkable
class WithFigures(Protocol):
    """A task with figures that are too expensive to compute before the end of a run."""

    def final_figures(
        self, predict: Predict, size: int, draws: Sequence[Draw], device: str
    ) -> dict[str, float]:
        """Name -> value on `draws`: at least one, all of the same held-out stream.

        `size` and `device` are as in `batch`. "loss" and the metric's name replace the mean
        over the batches of the draws.
        """


@runtime_checkable
class WithEnd(Protocol):
    """A task whose held-out data may be finite, so that it can be measured on all of them."""

    @property
    def has_end(self) -> bool:
        """Whether the held-out data are finite with these settings."""

    def whole_figures(
        self, predict: Predict, size: int, device: str, stream: int = TEST
    ) -> dict[str, float]:
        """Name -> value over all data of a held-out stream, loss and metric included.

        Called only if `has_end`; `size` and `device` are as in `batch`.
        """


@runtime_checkable
class WithData(Protocol):
    """A task over stored data, which must not change while a run lasts."""

    def stored_data(self) -> Mapping[str, np.ndarray]:
        """Description for the user -> data; empty if nothing is stored."""


@runtime_checkable
class WithFiles(Protocol):
    """A task with files that a run folder keeps, because its model is used with them."""

    def kept_files(self) -> Mapping[str, bytes]:
        """Name, one of `files.tokenizer.KEPT` -> content."""
