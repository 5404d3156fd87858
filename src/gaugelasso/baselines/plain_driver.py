"""The driver of a run without pressure, for methods that change the structure in their own way."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.courses.stages import Phase
from gaugelasso.compress.courses.window import Measured
from gaugelasso.compress.driver import TRIES, Driver
from gaugelasso.compress.events import Event
from gaugelasso.errors import UserError
from gaugelasso.training.answers import failure_advice
from gaugelasso.training.records import RunRecord
from gaugelasso.training.run_log import RunLog
from gaugelasso.training.state import RunState

# What a checkpoint keeps of every such run.
_KEPT = ("frozen_at", "returns", "failed_returns", "saved_at")


class PlainDriver(Driver):
    """Regular checkpoints, and a return to the newest one where steps fail.

    `frozen_at` is the step from which the structure stays: the fine-tuning of `finetune` steps
    begins there, with a cosine from the full rate to the least.
    """

    def __init__(self, state: RunState, log: RunLog, finetune: int):
        super().__init__(log, state.config.train.skip_limit)
        self.state, self.finetune = state, finetune
        self.frozen_at: int | None = None
        self.returns = self.failed_returns = self.saved_at = 0

    # --- what a checkpoint keeps ------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in _KEPT}
        return {"held_at": None, "pressure": 0.0, **kept}

    def load_(self, values: Mapping[str, Any]) -> None:
        for name in _KEPT:
            setattr(self, name, values[name])
        self.skipped = values["skipped"]

    # --- the schedule -----------------------------------------------------------------------

    @property
    def compressor(self) -> Compressor:
        return self.state.compressor

    def phase(self, step: int) -> Phase:
        raise NotImplementedError

    @property
    def settled(self) -> bool:
        """Whether a checkpoint of the present step is all that a resumed run needs."""
        return True

    def finetuning_rate(self, step: int) -> float:
        """The learning rate of a step of the fine-tuning."""
        assert self.frozen_at is not None
        high, low = self.state.config.compress.lr, self.state.config.train.lr_min
        through = (step - self.frozen_at) / self.finetune
        return low + (high - low) * 0.5 * (1 + math.cos(math.pi * through))

    def pressed_loss(self, step: int) -> float | None:
        return None

    def allowance(self, pressed_loss: float) -> float | None:
        return None

    def where(self) -> str:
        return self.state.where()

    def note(self, event: Event) -> None:
        """A change of the structure, for the history and the log."""
        self.compressor.history.append(event)
        self.log.event(event)

    # --- decisions --------------------------------------------------------------------------

    def observe(self, losses: Sequence[float], due: bool) -> None:
        """The record has them."""

    def decision_due(self) -> bool:
        return False

    def decide(self, due: bool) -> bool:
        return False

    def interval_closed(self) -> None:
        """Nothing follows from a logging interval."""

    def step_succeeded(self) -> None:
        self.failed_returns = 0

    def failed(self, reason: str) -> None:
        saved = self.state.saved.newest()
        if saved is None or self.failed_returns >= TRIES:
            raise UserError(f"{reason}; {failure_advice(saved)}")
        kept = saved.state()[0]
        self.return_to(saved.step, reason, lambda: self.state.load(saved))
        self.go_back_(kept)
        self.returns += 1
        self.failed_returns += 1

    def go_back_(self, kept: Mapping[str, Any]) -> None:
        """Take over what a checkpoint says of the structure that is back; steps go on."""
        self.frozen_at = kept["frozen_at"]

    def at_end(self, measured: Measured) -> Callable[[], None] | None:
        return None

    # --- checkpoints ------------------------------------------------------------------------

    @property
    def end(self) -> int:
        return self.least_end if self.frozen_at is None else self.frozen_at + self.finetune

    @property
    def least_end(self) -> int:
        """The earliest end, as long as the fine-tuning has not begun."""
        raise NotImplementedError

    def checkpoint_due(self, record: RunRecord) -> bool:
        every = self.state.config.train.checkpoint_every
        frozen = self.frozen_at is not None and self.saved_at < self.frozen_at
        owed = frozen or self.now == self.end or self.now // every > self.saved_at // every
        return self.settled and owed

    def before_save(self, record: RunRecord) -> None:
        self.saved_at = self.now

    def wanted_steps(self) -> list[int]:
        return []

    def is_missed(self, record: RunRecord) -> bool:
        """The method's own trainer says what was missed."""
        return False
