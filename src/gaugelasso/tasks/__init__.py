"""Tasks: what to learn. One protocol, one file a task, one row in TASKS."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from gaugelasso.models import InputKind
from gaugelasso.tasks.charlm import CharLM
from gaugelasso.tasks.ff31 import FF31
from gaugelasso.tasks.figures import Predict, WithEnd, WithFigures
from gaugelasso.tasks.mae import MaskedAutoencoder
from gaugelasso.tasks.noise import Noise
from gaugelasso.tasks.retrieval import Retrieval
from gaugelasso.tasks.stored import WithData
from gaugelasso.tasks.streams import EVALUATION, TRAINING, Draw


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


TASKS: Mapping[str, Any] = {
    "retrieval": Retrieval,
    "ff31": FF31,
    "charlm": CharLM,
    "mae": MaskedAutoencoder,
    "noise": Noise,
}

__all__ = [
    "EVALUATION",
    "FF31",
    "TASKS",
    "TRAINING",
    "CharLM",
    "Draw",
    "Illustrated",
    "MaskedAutoencoder",
    "Noise",
    "Predict",
    "Retrieval",
    "Task",
    "WithData",
    "WithEnd",
    "WithFigures",
]
