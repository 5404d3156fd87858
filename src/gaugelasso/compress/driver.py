"""The driver of a run: what is done around each step, and in which order.

    before a step      set learning rate, pressure and the loss to press towards
    after each step    note its loss and its event
    where it is due    read the losses; return if steps fail; log; decide; save

A subclass decides. The log writes. Knows nothing of files.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gaugelasso.compress.events import Event

if TYPE_CHECKING:
    from gaugelasso.compress.compressor import Compressor

_logger = logging.getLogger(__name__)
# How many times in a row a run goes back because steps fail.
TRIES = 3


class Log(Protocol):
    """What a driver reports to. The calls come in the order of these methods."""

    def step(self, fma: float) -> None:
        """A step of a model with this work per token is next."""

    def event(self, event: Event) -> None:
        """A structural event or a return has happened."""

    def due(self) -> bool:
        """Whether to read losses, log and save after this step, even if no decision is due."""

    def observed(self, losses: list[float]) -> None:
        """These are the losses since the last call."""

    def interval(self) -> None:
        """Steps have passed; what they led to is decided and saved next."""

    def save(self, keep: bool, due: bool) -> None:
        """The step is over. `keep`: the run may return to the state that it is in now."""

    def ended(self) -> None:
        """The run has returned to a state, and ends on it."""


class NoLog:
    """Writes nothing."""

    def step(self, fma: float) -> None:
        pass

    def event(self, event: Event) -> None:
        pass

    def due(self) -> bool:
        return False

    def observed(self, losses: list[float]) -> None:
        pass

    def interval(self) -> None:
        pass

    def save(self, keep: bool, due: bool) -> None:
        pass

    def ended(self) -> None:
        pass


class Driver(ABC):
    """One run. `skip_limit` skipped steps in a row are a failure, and the run returns."""

    # Read with the losses: skipped steps in all, those in a row up to then, and the longest row.
    skipped = failing = streak = 0

    def __init__(self, log: Log, skip_limit: int):
        self.log, self._skip_limit = log, skip_limit
        self._losses: list[Tensor] = []

    # --- decisions, by subclasses -----------------------------------------------------------

    @property
    @abstractmethod
    def compressor(self) -> "Compressor":
        """The compressor at work. A return may replace it, so nothing else holds on to it."""

    @property
    def now(self) -> int:
        """The point of the schedule: the steps taken."""
        return self.compressor.steps

    @property
    @abstractmethod
    def end(self) -> int:
        """The point of the schedule where the run ends, as far as it is known."""

    @property
    def steps_left(self) -> float:
        """The steps up to there, or an estimate."""
        return self.end - self.now

    @abstractmethod
    def rate(self, step: int) -> float:
        """The learning rate of a step."""

    @abstractmethod
    def pressed_loss(self, step: int) -> float | None:
        """The loss that a step presses towards; None for a step without pressure."""

    @abstractmethod
    def allowance(self, pressed_loss: float) -> float | None:
        """A bound on what one event may cost; None for that of the options alone."""

    @property
    def pressure(self) -> float:
        """The share of the pressure that the loss allows."""
        return 1.0

    @abstractmethod
    def observe(self, losses: Sequence[float], due: bool) -> None:
        """Take in the training losses of the last steps.

        Not `due`: the run stops between two due steps. They are for the next due one, where a run
        that does not stop reads them.
        """

    @abstractmethod
    def decision_due(self) -> bool:
        """Whether there is something to decide after this step."""

    @abstractmethod
    def decide(self, due: bool) -> bool:
        """Go on, or return to an earlier state; whether to keep the present one."""

    @abstractmethod
    def step_succeeded(self) -> None:
        """Not all of the last steps were skipped."""

    @abstractmethod
    def failed(self, reason: str) -> None:
        """Return to an earlier state, or end on one; UserError if there is none."""

    def where(self) -> str:
        """The place of a failure, for messages."""
        return f"at step {self.compressor.steps}"

    # --- the order of actions ---------------------------------------------------------------

    def before_step(self) -> None:
        """Set rate, pressure and pressed loss of the next step."""
        now, compressor = self.now, self.compressor
        pressed = self.pressed_loss(now)
        compressor.set_pressure_(0.0 if pressed is None else self.pressure)
        if pressed is not None:
            compressor.set_loss_target_(pressed, self.allowance(pressed))
        compressor.set_lr_(self.rate(now))
        compressor.end = compressor.steps + self.steps_left
        self.log.step(compressor.state.plan.training_work)

    def note_step(self, loss: Tensor, event: Event | None) -> None:
        """A step was taken. `loss` may stay on the device until losses are read."""
        self._losses.append(loss.detach())
        if event is not None:
            self.log.event(event)

    def advance(self, stopping: bool = False) -> None:
        """Read the losses, look after failing steps, log, decide and save, if it is due.

        `stopping`: the run is about to stop here, so that losses are read and saved in any case.
        The run that is resumed must be the one that never stopped, so nothing else is done early.
        """
        decides = self.decision_due()
        due = decides or self.log.due()
        if not due and not stopping:
            return
        self.read_losses(due)
        if due:
            self.compressor.scalars.reset_streak_()
            if self.streak >= self._skip_limit:
                self.fail("loss or gradient is NaN or infinite")
        # Before the decision: what is logged here is of the steps that led to it.
        self.log.interval()
        keep = self.decide(decides)
        self.log.save(keep, due)

    def read_losses(self, due: bool = True) -> None:
        """Take in the losses since the last call, and how many steps were skipped."""
        pending = [each.reshape(()).float() for each in self._losses]
        losses = torch.stack(pending).tolist() if pending else []
        self._losses.clear()
        self.observe(losses, due)
        skipped, self.failing, self.streak = self.compressor.scalars.counts()
        if skipped - self.skipped < len(losses):
            self.step_succeeded()
        self.skipped = skipped
        self.log.observed(losses)

    def fail(self, what: str) -> None:
        """Something failed here: `failed` decides what follows."""
        self.failed(f"{what} {self.where()}")

    def return_to(self, step: int, reason: str, load: Callable[[], None]) -> None:
        """Go on from the state of an earlier step, which `load` loads, at the present step."""
        began, fma = time.perf_counter(), self.compressor.fma
        load()
        compressor = self.compressor  # which may be another one
        compressor.scalars.recount_(self.skipped)
        self.failing = self.streak = 0
        steps, seconds = compressor.steps, time.perf_counter() - began
        event = Event.returned(steps, step, fma, compressor.fma, compressor.widths, seconds)
        compressor.history.append(event)
        self.log.event(event)
        compressor.resume_state.check_same(steps, f"back at the state of step {step}")
        _logger.warning("warning: %s; back to the state of step %d", reason, step)
