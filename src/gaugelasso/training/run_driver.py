"""What the trainer, its state and its log need of the driver of a run."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from gaugelasso.compress.courses.stages import Phase
from gaugelasso.compress.courses.window import Measured
from gaugelasso.compress.events import Event
from gaugelasso.training.records import RunRecord


class RunDriver(Protocol):
    """A `compress.driver.Driver` with a schedule, and with what a checkpoint keeps of it."""

    skipped: int
    failing: int

    @property
    def end(self) -> int:
        """The number of steps of the whole run, as far as it is known."""

    def phase(self, step: int) -> Phase: ...

    def rate(self, step: int) -> float: ...

    def pressed_loss(self, step: int) -> float | None:
        """The loss that a step presses towards; None for a step without pressure."""

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""

    def load_(self, values: Mapping[str, Any]) -> None:
        """Take over what `to_dict` gave, and the number of skipped steps."""

    def before_step(self) -> None: ...

    def note_step(self, loss: Tensor, event: Event | None) -> None: ...

    def advance(self, stopping: bool = False) -> None: ...

    def interval_closed(self) -> None:
        """A logging interval has ended."""

    def fail(self, what: str) -> None: ...

    def at_end(self, measured: Measured) -> Callable[[], None] | None:
        """What to do about the final model; None if it stays."""

    def checkpoint_due(self, record: RunRecord) -> bool: ...

    def before_save(self, record: RunRecord) -> None: ...

    def wanted_steps(self) -> list[int]:
        """Checkpoints to keep beside the newest."""

    def is_missed(self, record: RunRecord) -> bool:
        """Whether a final model that does not hold its target means that the run has failed."""
