"""Tasks: what to learn. One protocol, one file a task, one row in TASKS."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from torch import Tensor

from gaugelasso.tasks.ff31 import FF31
from gaugelasso.tasks.figures import Predict, WithFigures
from gaugelasso.tasks.noise import Noise
from gaugelasso.tasks.retrieval import Retrieval
from gaugelasso.tasks.streams import EVALUATION, TRAINING, Draw


class Task(Protocol):
    """A source of batches and the loss and metric of a model's outputs on them.

    A task is a frozen dataclass whose fields are the keys of a config's [task]
    section. Batches are a function of their arguments alone, and lie on the device.
    One that has more to say of a finished model is also a `WithFigures`.
    """

    metric_name: str
    input_kind: Literal["tokens", "patches"]
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
        """Mean metric, a 0-dim tensor; higher is better."""


TASKS: Mapping[str, Any] = {"retrieval": Retrieval, "ff31": FF31, "noise": Noise}

__all__ = [
    "EVALUATION",
    "FF31",
    "TASKS",
    "TRAINING",
    "Draw",
    "Noise",
    "Predict",
    "Retrieval",
    "Task",
    "WithFigures",
]
