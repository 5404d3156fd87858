"""Rollback: whether a pressed run goes back to an earlier checkpoint, and which one it ends on.

`Rollback` owns every number that this depends on. The run asks it four questions: after each
logging interval, before a checkpoint is written, when steps fail, and at the end of the schedule.
The answer is `Stay`, `ReturnTo` or `EndOn`. The run carries it out and reports back.

Under pressure the loss swings around its target, and most excursions end by themselves. The
default of `train.patience` is longer than any that did under the conservative solver, in 40
runs of retrieval and two of ff31 at the paper's size (docs/development/log.md).
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gaugelasso.compress.driver import TRIES
from gaugelasso.errors import UserError
from gaugelasso.runs.checkpoint import Checkpoint
from gaugelasso.training.answers import Answer, EndOn, ReturnTo, Stay, failure_advice
from gaugelasso.training.held import off_target, thinned
from gaugelasso.training.phases import Phases
from gaugelasso.training.records import RunRecord


@dataclass
class Rollback(Phases):
    """Fields that end in `_at` or `_step` are steps; a checkpoint keeps all but the first three."""

    # Checkpoints: the last that was due; the one to go back to when steps fail; one that held the
    # target and waits to be confirmed by the next logging interval.
    saved_at: int = 0
    fallback_step: int | None = None
    pending_step: int | None = None
    pending_fma: float = 0.0
    # Confirmed: the last, the one before it, and these with older ones of other sizes: step -> FMA.
    held_at: int | None = None
    held_before_at: int | None = None
    held: dict[int, float] = field(default_factory=dict)
    # Returns: the held checkpoint last returned to; all; those since a step last succeeded.
    last_return_step: int | None = None
    returns: int = 0
    failed_returns: int = 0
    # The loss under pressure: for how long it is off its target, and for how long it is not.
    steps_off_target: int = 0
    steps_on_target: int = 0
    # The share of the pressure that the loss allows: halved where the target is lost.
    pressure: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        saved = (f.name for f in dataclasses.fields(self) if f.metadata.get("saved", True))
        return {name: getattr(self, name) for name in saved}

    def load_(self, values: Mapping[str, Any]) -> None:
        """Take over what `to_dict` gave, also after JSON has made text of the steps in `held`."""
        for name in self.to_dict():
            setattr(self, name, values[name])
        self.held = {int(step): fma for step, fma in self.held.items()}

    # --- 1: after a logging interval ----------------------------------------------------

    def after_interval(self, record: RunRecord, pressed: bool) -> Answer:
        """Return to a checkpoint that held the target once the loss is off it for too long.

        Also confirms or drops the pending checkpoint. `pressed`: under compression.
        """
        self._confirm_(record, pressed)
        if not 0 < self.config.train.patience <= self.steps_off_target:
            return Stay()
        if saved := self.states.first_intact(self.held_steps()):
            reason = f"loss off its target for {self.steps_off_target} steps, pressure halved"
            return ReturnTo(saved, reason)
        self.held_at = self.held_before_at = None
        return Stay()

    def _confirm_(self, record: RunRecord, pressed: bool) -> None:
        """Whether the pending checkpoint held its target, and for how long the loss is off it.

        A checkpoint is written after its step's event. Whether the event cost the target shows
        only in a logging interval that lies after it.
        """
        off = self._is_off(record)
        if off is None:
            return
        pending, holds = self.pending_step, record.holds(self.config.target.pressed)
        if pending is not None and pending <= record.row_at and (off or holds):
            if not off:
                self._hold_(pending, self.pending_fma)
            self.pending_step = None
        if pressed and record.reached_at is not None:
            self._count_(off)
        else:
            self.steps_off_target = 0

    def _count_(self, off: bool) -> None:
        """Count a logging interval under pressure; pressure that was halved comes back in time.

        It doubles after `patience / pressure` steps in a row that are not off target, so the
        wait is longer the more often the target was lost.
        """
        train = self.config.train
        self.steps_off_target = self.steps_off_target + train.log_every if off else 0
        self.steps_on_target = 0 if off else self.steps_on_target + train.log_every
        if self.pressure < 1 and self.steps_on_target * self.pressure >= train.patience:
            self.pressure, self.steps_on_target = 2 * self.pressure, 0

    def _is_off(self, record: RunRecord) -> bool | None:
        """Whether the last interval is off target; None if it has no loss."""
        if record.loss is None or record.first_loss is None:
            return None
        return off_target(record.loss, self.config.target.pressed, record.first_loss)

    def _hold_(self, step: int, fma: float) -> None:
        """This checkpoint held the target."""
        self.held_before_at, self.held_at = self.held_at, step
        self.held = thinned({**self.held, step: fma}, (self.held_before_at, step))

    def held_steps(self) -> list[int]:
        """Checkpoints that held the target, the preferred one first: the last, then older ones.

        Where the last return to the newest did not help, only the older ones, if there are any.
        """
        tried = self.last_return_step == self.held_at and self.held_before_at is not None
        last = [self.held_before_at] if tried else [self.held_at, self.held_before_at]
        steps = [step for step in last if step is not None]
        older = [step for step in self.held if step < min(steps, default=0)]
        return steps + sorted(older, reverse=True)

    # --- 2: before a checkpoint is written ----------------------------------------------

    def checkpoint_due(self, record: RunRecord, step: int) -> bool:
        """Whether a checkpoint is due now, or was due while steps failed.

        Beside the regular ones: the start of an anneal has one, and so has the first interval
        within the target, or there would be nothing to return to.
        """
        every = self.config.train.checkpoint_every
        begun = self.frozen_at is not None and self.saved_at < self.frozen_at
        first = not self.held and self.pending_step is None and record.open_at == step
        reached = first and record.holds(self.config.target.pressed)
        return step == self.end or begun or reached or step // every > self.saved_at // every

    def before_save_(self, record: RunRecord, step: int, fma: float) -> None:
        """A due checkpoint is about to be written: what may it be used for?"""
        self.saved_at = step
        if not self._has_lost(record):
            self.fallback_step = step
        if not record.holds(self.config.target.pressed):
            return
        if step == self.frozen_at:
            self._hold_(step, fma)  # no event since the last interval began: confirmed
        elif self.pending_step is None:
            self.pending_step, self.pending_fma = step, fma

    def _has_lost(self, record: RunRecord) -> bool:
        """Whether the last interval is off a target that a checkpoint has held."""
        return bool(self.held) and bool(self._is_off(record))

    def wanted_steps(self) -> list[int]:
        """Checkpoints to keep beside the newest: the run may return to them."""
        wanted = self.pending_step, self.fallback_step, *self.held
        return [step for step in wanted if step is not None]

    # --- 3: when steps fail ---------------------------------------------------------------

    def after_failure(self, reason: str, step: int, work_target_met: bool) -> Answer:
        """Return to the best checkpoint; after `TRIES` in a row end on one that held the target.

        UserError if there is no such checkpoint either.
        """
        candidates = self.fallback_steps()
        if self.frozen_at == step:
            self.frozen_at = None  # the anneal has not begun
        if self.phase(step - 1) != "compression":
            small = self._within_work_target(candidates, work_target_met)
            candidates.sort(key=lambda each: each not in small)
        saved = self.states.first_intact(candidates) or self.states.newest()
        if saved is not None and self.failed_returns < TRIES:
            return ReturnTo(saved, reason, failed=True)
        if end := self._smallest_that_holds(-math.inf, work_target_met):
            return EndOn(end, f"{reason}; the run ends here, on a state that held its target")
        raise UserError(f"{reason}; {failure_advice(saved)}")

    def fallback_steps(self) -> list[int]:
        """Checkpoints to return to when steps fail, the preferred one first.

        The newest that was not off its target; where that did not help, those that held it.
        """
        newest = [] if self.fallback_step is None else [self.fallback_step]
        held = self.held_steps()
        return list(dict.fromkeys(held + newest if self.failed_returns else newest + held))

    def step_succeeded_(self) -> None:
        self.failed_returns = 0

    # --- 4: at the end ----------------------------------------------------------------------

    def at_end(self, loss: float, record: RunRecord, work_target_met: bool) -> Answer:
        """What to do where the final model misses its target; `loss` is that on selection data.

        If training lost the target too, during the anneal, the anneal is repeated once from a
        checkpoint that held it. Otherwise the run ends on the smallest held checkpoint that also
        holds the target on selection data.
        """
        target = self.config.target.pressed
        loss = loss if math.isfinite(loss) else math.inf
        if loss <= target or self.ended_at is not None:
            return Stay()
        reason = f"held-out loss {loss:.4g} after the anneal"
        lost = not record.holds(target)
        anneal = self.schedule.anneal(self.frozen_at)
        if lost and anneal and not self.second_anneal_steps:
            candidates = self._within_work_target(self.held_steps(), work_target_met)
            if saved := self.states.first_intact(candidates):
                return ReturnTo(saved, reason, anneal_steps=anneal)
        bar = loss if lost or math.isinf(loss) else -math.inf
        end = self._smallest_that_holds(bar, work_target_met)
        return EndOn(end, reason) if end else Stay()

    def _smallest_that_holds(self, bar: float, work_target_met: bool) -> Checkpoint | None:
        """The smallest held checkpoint within the target on selection data; of equals the last.

        Where there is none, the smallest whose loss is below `bar`.
        """
        better = None
        smallest_first = sorted(self.held, key=lambda step: (self.held[step], -step))
        for step in self._within_work_target(smallest_first, work_target_met):
            if saved := self.states.first_intact([step]):
                loss = self.states.selection_loss(saved)
                if loss <= self.config.target.pressed:
                    return saved
                if loss < bar:
                    better = better or saved
        return better

    def _within_work_target(self, steps: Iterable[int], work_target_met: bool) -> list[int]:
        """Of these checkpoints those that keep a work target that is met."""
        most = self.config.target.fma if work_target_met else math.inf
        return [step for step in steps if self.held.get(step, 0.0) <= most]

    # --- what the run reports back ------------------------------------------------------

    def returned_(self, answer: ReturnTo | EndOn, step: int) -> None:
        """The run, at step `step` of its schedule, has loaded the answer's checkpoint."""
        to = answer.saved.step
        self.returns += 1
        if to in self.held_steps():
            self.last_return_step = to
            if to != self.held_at:
                self.held_at, self.held_before_at = to, None
        self.fallback_step = to
        self.steps_off_target = self.steps_on_target = 0
        self.pending_step = None
        if isinstance(answer, EndOn):
            self.held_at, self.ended_at = to, step
            self.held.pop(step, None)  # its place is taken by the checkpoint written next
        elif answer.anneal_steps:
            self.second_anneal_steps, self.frozen_at = answer.anneal_steps, step
        elif answer.failed:
            self.failed_returns += 1
        else:
            self.pressure /= 2
