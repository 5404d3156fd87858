"""The compressor: what a training loop calls.

    compressor = Compressor(model, loss_target=0.05, steps=3000)
    for inputs, targets in data:
        compressor.step(lambda: cross_entropy(model(inputs), targets))
    result = compressor.finish()

The compressor owns the optimizer: it takes the step and clears the gradients. It combines the
parts of the method; the order of a step is in `device_step`, that of an event in
`structural_event`, and the phases of a run are in `course`.
"""

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaugelasso.axes import Compressible
from gaugelasso.compress.checks import (
    StepChecks,
    backward_of,
    check_exchange,
    check_length,
    check_model,
    check_number,
    check_options,
    check_prices,
    check_targets,
    check_work_target,
)
from gaugelasso.compress.courses.choice import course_of
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.compress.defaults import chosen_options
from gaugelasso.compress.device_step import DeviceStep
from gaugelasso.compress.events import CUT_SHARE, DropHook, Event, EventRules, allowances
from gaugelasso.compress.flat_optimizer import FlatOptimizer
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.options import CompressorOptions, ExecutionOptions
from gaugelasso.compress.pilot import Pilot
from gaugelasso.compress.recording import Recorder, open_recorder
from gaugelasso.compress.result import Result
from gaugelasso.compress.resume_state import ResumeState
from gaugelasso.compress.solver import RhoSolver
from gaugelasso.compress.step_scalars import StepScalars
from gaugelasso.compress.structural_event import hold_event_
from gaugelasso.compress.time_budget import TimeBudget
from gaugelasso.distributed import ALONE, Team
from gaugelasso.errors import UserError


class Compressor:
    """Shrinks `model` while it trains, down to the size that still has the loss `loss_target`.

    With `steps`, the number of steps of the whole run, or `seconds`, its time, `loss_target` is
    the loss of the final model, and the compressor sets rate and pressure itself. The loop only
    calls `step`, and `finish` at the end. `evaluate` returns the loss on held-out data; without it
    the last training batches decide. `record` names a run folder to write, and `resume` goes on
    with the run in it.

    Without `steps` it is the method alone: `loss_target` is the loss to press towards, and the
    loop sets rate and pressure (`set_lr_`, `set_pressure_`).

    `probe` returns the loss of the current batch without gradients. With a probe, no event raises
    that loss by more than `drop_tolerance` times the target: indices that the batch needs are
    kept, and a split, balance or cut that costs more is undone.

    With an `fma_target`, the last cut stops at the index that brings the work per token there.
    Then there is no pressure any more. With `steps` and no `loss_target`, that work is the target.
    With a `metric_target`, alone or beside `loss_target`, `evaluate` returns loss and metric.

    With a `team`, every rank has a compressor of the same model, calls it at the same steps, and
    has a `probe` that returns the same value on every rank. Gradients, losses and energies are
    averaged over ranks; rank 0 decides. `execution` is for trainers with graphs or micro-batches.

    Public for trainers: `state` (the model with all that is built on its structure), `scalars`
    (learning rate, pressure, rho, skipped steps), `device_step` (the halves of a step that a CUDA
    graph captures), `resume_state` (what a checkpoint holds) and `optimizer`.
    """

    def __init__(
        self,
        model: Compressible,
        loss_target: float | None = None,
        options: CompressorOptions | None = None,
        probe: Callable[[], float] | None = None,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        evaluate: Callable[[], Any] | None = None,
        record: str | os.PathLike[str] | Recorder | None = None,
        resume: bool = False,
        metric_target: float | MetricTarget | None = None,
        fma_target: float = 0.0,
        team: Team = ALONE,
        execution: ExecutionOptions | None = None,
    ):
        check_model(model)
        metric = check_targets(loss_target, metric_target, fma_target, steps or seconds, evaluate)
        check_options(options, probe)
        total = check_length(steps, seconds, evaluate, record, resume, team.size)
        given = options or CompressorOptions()
        # From the initial model, also for a run that goes on.
        options = self.options = chosen_options(given, model, total)
        check_work_target("fma_target", fma_target if total else 0.0, model, options)
        recorder = open_recorder(record, resume)
        if recorder is not None:
            recorder.prepare(model)
        pressed = loss_target or 0.0  # a course sets it before each step
        self.solver = RhoSolver(options.solver, pressed, options.rho)
        self.model, self.probe, self.fma_target = model, probe, fma_target
        self.steps, self.end, self.cut_share = 0, math.inf, CUT_SHARE  # a driver sets the last two
        self.history, self.hooks = list[Event](), list[DropHook]()
        self.state = ModelState(model, options, execution or ExecutionOptions(), team)
        check_prices(self.state)
        check_exchange(self.state)
        self._checks = StepChecks(self.state, pressed)
        weight, smoothing = self.state.optimizer.store.weight, options.loss_smoothing
        following = options.step_norm_rate, any(norm.by_token for norm in self.state.table.norms)
        self.scalars = StepScalars(weight, self.solver, smoothing, *following)
        how = options.relative_step, options.coupling
        self.device_step = DeviceStep(self.state, self.scalars, *how)
        self.resume_state = ResumeState(self.state, self.scalars)
        self.set_lr_(options.lr)
        self.set_loss_target_(pressed)
        self.fma_initial = self.fma
        self._end_pressure_at_target_()
        self.pilot: Pilot | None = None
        if total:
            by_harm = options.removal == "harm"
            course = course_of(loss_target, metric, fma_target, total, options.lr, by_harm=by_harm)
            time = None if seconds is None else TimeBudget(seconds, given.interval is None)
            self.pilot = Pilot(self, course, evaluate, time, recorder)

    # --- one step ---------------------------------------------------------------

    def step(self, loss: Tensor | Callable[[], Tensor]) -> Event | None:
        """Take one optimizer step; every `interval` steps also hold an event.

        `loss` is a function that returns the loss of the batch; `step` calls it, and runs the
        backward pass. At an event the function is called again, as the probe. Or it is the loss
        itself, after `loss.backward()`.
        """
        if self.pilot is not None:
            self.pilot.before_step()
        if callable(loss):
            loss, self.probe = backward_of(loss, self.state)
        self._checks.before_step(loss, thorough=self.steps % self.options.interval == 0)
        mean = self.device_step.update_(loss.detach().reshape(()))
        event = self.finish_step_()
        if self.pilot is not None:
            self.pilot.after_step(mean.clone(), event)
        self._checks.after_step()
        return event

    def finish(self) -> Result:
        """The result of a run with `steps` or `seconds`; warns if the target loss is missed."""
        if self.pilot is None:
            raise UserError("finish() needs a run: give Compressor the number of its steps")
        return self.pilot.finish()

    @property
    def done(self) -> bool:
        """Whether all steps, or all the time, of the run are used."""
        return self.pilot is not None and self.pilot.done

    def finish_step_(self) -> Event | None:
        """The host's part of a step, after `device_step.update_`: counts, holds an event if due."""
        self.steps += 1
        if self.steps % self.options.interval or not bool(self.scalars.pressed):
            return None
        self.scalars.pressed.zero_()
        return self.event_()

    def set_lr_(self, lr: float) -> None:
        """Set the learning rate of the next steps."""
        check_number("lr", lr, least=0)
        self.scalars.set_lr_(lr)

    def set_loss_target_(self, loss: float, allowance: float | None = None) -> None:
        """Set the loss to press towards, and how much an event may raise a batch's loss."""
        check_number("loss_target", loss)
        self.scalars.set_loss_target_(loss)
        self._allowances = allowances(loss, self.options.drop_tolerance, allowance)

    def set_pressure_(self, share: float) -> None:
        """Apply a share of the penalty strength that the margin allows; 0 is plain training.

        Has no effect once the work target is met: pressure after every batch with a low loss would
        keep the mean loss above its target. Call it again after setting a lower work target.
        """
        check_number("pressure", share, least=0)
        self.scalars.set_pressure_(0.0 if self.work_target_met else float(share))

    def _end_pressure_at_target_(self) -> None:
        if self.work_target_met:
            self.set_pressure_(0.0)

    # --- one structural event ---------------------------------------------------

    @torch.no_grad()
    def event_(self) -> Event:
        """Hold a structural event now: split, balance, cut channels and operators, exchange."""
        rules = EventRules(
            step=self.steps,
            threshold=self.options.trust * float(self.scalars.lr),
            # With a positive rho, the loss of this step had margin to its target.
            pressing=bool(self.scalars.rho),
            fma_target=self.fma_target,
            loss_allowance=self._allowances[0],
            probe=self.probe,
            hooks=self.hooks,
            cut_share=self.cut_share,
            operator_allowance=self._allowances[1],
            interval=self.options.interval,
            left=self.end - self.steps,
        )
        event = hold_event_(self.state, self.resume_state, rules)
        self.history.append(event)
        self._end_pressure_at_target_()
        return event

    def on_drop(self, hook: DropHook) -> DropHook:
        """Register a hook; usable as a decorator.

        It receives each axis's `Drop` before the cut and returns the indices that may go, or True
        or None for all of them, or False for none.
        """
        self.hooks.append(hook)
        return hook

    # --- progress ---------------------------------------------------------------

    @property
    def optimizer(self) -> FlatOptimizer:
        return self.state.optimizer

    @property
    def fma(self) -> float:
        """Work per token, by the chosen accounting."""
        return self.state.fma

    @property
    def work_target_met(self) -> bool:
        """Whether there is a work target and it is met."""
        return self.fma_target > 0 and self.fma <= self.fma_target

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return self.state.parameters

    @property
    def widths(self) -> dict[str, int]:
        """Axis name -> number of surviving indices."""
        return self.state.widths()

    @property
    def structure(self) -> dict:
        """The model's structure, from which the same network can be built."""
        return self.model.structure()

    @property
    def prices(self) -> dict[str, np.ndarray]:
        """r: axis name -> the work per token that each index saves."""
        return self.state.prices

    def utility(self) -> dict[str, Tensor]:
        """Axis name -> corrected utility of each index, per unit of rho."""
        return self.state.utility()

    @property
    def rho(self) -> Tensor:
        """The last penalty strength."""
        return self.scalars.rho

    @property
    def skipped(self) -> Tensor:
        """The number of steps that were skipped because loss or gradient was NaN or infinite."""
        return self.scalars.skipped

    @property
    def failing(self) -> Tensor:
        """How many of the last steps in a row were skipped."""
        return self.scalars.failing

    # --- state, for checkpoints ---------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything beside the model that the next step depends on."""
        return self.resume_state.tensors()

    def load_state_tensors_(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Load a saved state; the model must already have the structure it was saved with."""
        self.resume_state.load_(tensors)
        self.steps = steps
        self._end_pressure_at_target_()
