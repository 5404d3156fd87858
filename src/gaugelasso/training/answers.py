"""What a rollback can answer, and what it needs of the checkpoints to do so."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from gaugelasso.runs.checkpoint import Checkpoint


class SavedStates(Protocol):
    """The checkpoints of a run, as far as a rollback needs them. Alike on every rank."""

    def first_intact(self, steps: Iterable[int]) -> Checkpoint | None:
        """The first of these steps' checkpoints that is there and undamaged."""

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is undamaged."""

    def selection_loss(self, saved: Checkpoint) -> float:
        """The loss of a saved model on the data that decide."""


@dataclass(frozen=True)
class Stay:
    """Go on with the present state."""


@dataclass(frozen=True)
class ReturnTo:
    """Load this checkpoint and continue from it, at the present step of the schedule."""

    saved: Checkpoint
    reason: str
    anneal_steps: int = 0  # if positive, a second anneal of this length starts there
    failed: bool = False  # because steps failed


@dataclass(frozen=True)
class EndOn:
    """Load this checkpoint and end the run on it."""

    saved: Checkpoint
    reason: str


Answer = Stay | ReturnTo | EndOn


def failure_advice(saved: Checkpoint | None) -> str:
    """What to do if steps go on to fail; `saved` is the checkpoint to return to, if any."""
    last = f"last good checkpoint: {str(saved.path)!r}" if saved else "no checkpoint yet"
    return f"{last}. Lower compress.lr, or try another seed"
