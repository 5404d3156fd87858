"""The conductor: the order of one step and of one structural event. No mathematics here.

    compressor = Compressor(model, loss_target=0.05)
    for inputs, targets in data:
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        compressor.step(loss)

The compressor owns the optimizer: it takes the step and clears the gradients.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gaugelasso.axes import AxisTable, Compressible, named_tensors
from gaugelasso.compress.drop import NOTHING, Decision
from gaugelasso.compress.events import DropHook, Event
from gaugelasso.compress.guard import Guard
from gaugelasso.compress.model_state import ModelState, PerStructure
from gaugelasso.compress.optim import CoupledOptimizer
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.compress.selection import select_drops
from gaugelasso.compress.solver import RhoSolver
from gaugelasso.compress.step_scalars import StepScalars
from gaugelasso.distributed import ALONE, Team, fingerprint
from gaugelasso.errors import UserError


class Compressor:
    """Shrinks `model` while it trains, holding `loss_target`.

    `probe`, if given, returns the loss of the current batch without gradients. No event leaves
    it higher than before by more than `drop_tolerance` times the target: channels that the batch
    would miss stay, and a split, balance or cut that costs more is undone. With an `fma_target` the
    last cut goes no further than the channel that brings the work per token there, and then
    nothing presses any more. `graph` lets a GPU repeat the balance as a CUDA graph.

    With a `team` every rank has a compressor of the same model, calls it as often, and has a
    `probe` that returns the same everywhere: gradients, losses and energies are averaged over
    ranks, rank 0 decides. With several micro-batches a step, each is told by `add_microbatch_`.
    """

    def __init__(
        self,
        model: Compressible,
        loss_target: float,
        options: CompressorOptions | None = None,
        probe: Callable[[], float] | None = None,
        graph: bool = True,
        team: Team = ALONE,
        micros: int = 1,
        canonical: bool = False,
        fma_target: float = 0.0,
    ):
        if not isinstance(model, Compressible):
            raise TypeError(
                f"{type(model).__name__} does not say what can be cut out of it: give a "
                "gaugelasso.Transformer, or a Compressible of your own (docs/how-to/own-model.md)"
            )
        self.model = model
        self.options = options or CompressorOptions()
        self.solver = RhoSolver(self.options.solver, loss_target, self.options.rho)
        self.probe, self.team, self.fma_target = probe, team, fma_target
        self.history: list[Event] = []
        self.hooks: list[DropHook] = []
        self.steps = 0
        self._last_set: dict[str, float] = {}
        # Above 0 once any rank has wished to stop, and a step has brought the others word of it.
        self.stop_requested = torch.zeros((), device=next(model.parameters()).device)
        self._state = ModelState(
            model, self.options, self.stop_requested, graph, team, micros, canonical
        )
        # `norm_rate` is what slow weights follow in one interval; this is one step's share.
        norm_rate = 1 - (1 - self.options.norm_rate) ** (1 / self.options.interval)
        weight = self._plan.store.weight
        self.scalars = StepScalars(weight, self.solver, self.options.loss_smoothing, norm_rate)
        self.set_lr_(self.options.lr)
        self.fma_initial = self.fma
        self._rest_()

    # --- one step ---------------------------------------------------------------

    def step(self, loss: Tensor) -> Event | None:
        """Take one optimizer step after `loss.backward()`; every `interval` steps also an event."""
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"step wants the loss that backward was called on, a tensor, not {loss!r}"
            )
        self.update_(loss.detach())
        return self.finish_step_()

    @torch.no_grad()
    def update_(self, loss: Tensor) -> Tensor:
        """The device's part of a step: momentum, penalty, rho, update. Reads nothing back.

        Where loss or gradient is not a number nothing moves: the step is counted as skipped.
        Returns the loss, of all ranks.
        """
        store, optimizer = self._plan.store, self.optimizer
        loss = self._plan.means.finish_(loss)
        sound = self.scalars.check_finite_(loss, store.grad)
        optimizer.observe_(sound)
        norms = self._plan.penalty.norms(store.weight)
        gradient = self._plan.penalty.gradient(store.weight, norms)
        lr, norm_rate = self.scalars.solve_rho_(optimizer.momentum, gradient, sound)
        optimizer.step_(gradient, self.scalars.rho, lr, self._bounded_rate(norms, lr))
        self._plan.slow.follow_(norm_rate)
        return loss

    @torch.no_grad()
    def add_microbatch_(self, micro: int, loss: Tensor) -> None:
        """One of several micro-batches has been through its backward pass."""
        self._plan.means.add_microbatch_(micro, loss)

    def _bounded_rate(self, norms: Tensor, lr: Tensor) -> Tensor | None:
        """The elementwise path's rates, less for groups they would change too much, if bounded."""
        bound = self.options.relative_step
        if not bound:
            return None
        return self._plan.penalty.bounded_rate(norms, lr, bound, self.optimizer.matrix_end)

    def finish_step_(self) -> Event | None:
        """The host's part of a step: count, and hold an event when one is due."""
        self.steps += 1
        if self.steps % self.options.interval or not bool(self.scalars.pressed):
            return None
        self.scalars.pressed.zero_()
        return self.event_()

    def set_pressure_(self, share: float) -> None:
        """Press with a share of the strength that the margin allows; 0: plain training.

        Of no effect once the work target is met: pressure that comes with every lucky batch would
        keep the mean loss above its own target. To be called again where a new target is lower.
        """
        share = 0.0 if self.work_target_met else float(share)
        if self._changes("pressure", share):
            self.scalars.pressure.fill_(share)
            if not share:
                self.scalars.pressed.zero_()

    def _rest_(self) -> None:
        """Where the work target is met, press no more."""
        if self.work_target_met:
            self.set_pressure_(0.0)

    def set_lr_(self, lr: float) -> None:
        if self._changes("lr", lr):
            self.scalars.lr.fill_(lr)

    def _changes(self, name: str, value: float) -> bool:
        """Whether a device scalar was not set to this value last: if not, a launch is saved."""
        before, self._last_set[name] = self._last_set.get(name), value
        return before != value

    # --- one structural event ---------------------------------------------------

    @torch.no_grad()
    def event_(self) -> Event:
        """Split, balance, decide, cascade, cut; what costs the batch too much is undone."""
        began, before, state = time.perf_counter(), self.fma, self._state
        self.check_same(f"before the event of step {self.steps}")
        allowance = self.options.drop_tolerance * abs(self.solver.loss_target)
        guard = Guard(self.model, self.probe, allowance)
        splits = self._split_(guard)
        prices = self.prices  # of what a cut would find
        if state.balances:
            pressing = bool(
                self.scalars.rho
            )  # so this step's loss had margin, as the solver sees it
            guard.try_("balance", lambda: state.balance_(pressing), state.snapshot_values)
        balanced = guard.loss
        threshold = self.options.trust * float(self.scalars.lr)
        choice = select_drops(state, guard, self.hooks, self.steps, threshold, self.fma_target)
        cut = self._cut_(choice.decision or NOTHING, guard)
        event = Event(
            step=self.steps,
            fma_before=before,
            fma=self.fma,
            dropped=cut.dropped(),
            prices=cut.saved(prices),
            removed=cut.removed,
            widths=self.widths,
            seconds=time.perf_counter() - began,
            loss_before=guard.before,
            loss_balanced=balanced,
            loss_after=guard.loss,
            refused=choice.decision is None,
            splits=splits,
            spared=choice.spared,
            withheld=choice.withheld,
            undone=guard.undone,
        )
        self.history.append(event)
        self._rest_()
        return event

    def _split_(self, guard: Guard) -> int:
        """How many sites became two."""
        state, splits = self._state, self._state.find_splits()
        stay = splits and guard.try_("split", lambda: state.split_(splits), state.snapshot_modules)
        return len(splits) if stay else 0

    def _cut_(self, decision: Decision, guard: Guard) -> Decision:
        """What was cut: the decision, or nothing."""
        state, when = self._state, f"after the cut of step {self.steps}"
        cuts = decision.dropped() and guard.try_(
            "cut", lambda: state.cut_(decision, when), state.snapshot_modules
        )
        return decision if cuts else NOTHING

    # --- state, for checkpoints ---------------------------------------------------

    def _scalars(self) -> dict[str, Tensor]:
        return {**self.scalars.state(), "decay": self.optimizer.decay}

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything beside the model that the next step depends on."""
        tensors = dict(self._scalars())
        for kind, views in self.optimizer.states().items():
            tensors |= {f"{kind}.{name}": view for name, view in views.items()}
        return tensors

    @torch.no_grad()
    def load_state_tensors_(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Take up a saved state; the model must already have the structure it was saved with."""
        here = self.state_tensors()
        if here.keys() != tensors.keys():
            odd = sorted(here.keys() ^ tensors.keys())
            raise UserError(f"optimizer state does not fit the model: {', '.join(odd[:5])}")
        for name, tensor in here.items():
            if tensor.shape != tensors[name].shape:
                raise UserError(f"optimizer state {name!r} does not fit the model's shape")
            tensor.copy_(tensors[name])
        self._last_set.clear()
        self.steps = steps
        self._rest_()

    def forget_energies_(self) -> None:
        """After a skipped step: what its inputs' energies were, the next step overwrites."""
        tensors = named_tensors(self.model)
        for norm in self.table.norms:
            tensors[norm.energy].nan_to_num_(0.0, 0.0, 0.0)

    def finite(self) -> bool:
        """Whether everything that the next step depends on is a number."""
        kept = [*named_tensors(self.model).values(), *self._scalars().values()]
        kept += [self.optimizer.momentum, self.optimizer.second]
        floating = [tensor.detach() for tensor in kept if tensor.is_floating_point()]
        return bool(torch.stack([tensor.isfinite().all() for tensor in floating]).all())

    def check_same(self, when: str) -> None:
        """RanksDiffer unless all ranks stand where rank 0 does; `when` says at what point."""
        if self.team.size > 1:
            tensors = {**named_tensors(self.model), **self.state_tensors()}
            self.team.check_same(fingerprint(tensors, self.steps, self.structure), when)

    # --- what users look at -----------------------------------------------------

    @property
    def table(self) -> AxisTable:
        """The axis table of the model as it stands."""
        return self._state.table

    @property
    def optimizer(self) -> CoupledOptimizer:
        return self._state.optimizer

    @property
    def rebuilds(self) -> int:
        """How often the structure was taken up anew: captures of older ones are void."""
        return self._state.rebuilds

    @property
    def _plan(self) -> PerStructure:
        return self._state.plan

    @property
    def widths(self) -> dict[str, int]:
        """Axis name -> surviving indices."""
        return self.table.widths(named_tensors(self.model))

    @property
    def structure(self) -> dict:
        """The model's structure, from which the same network can be built."""
        return self.model.structure()

    @property
    def fma(self) -> float:
        """Work per token, by the chosen accounting."""
        return self._plan.fma

    @property
    def work_target_met(self) -> bool:
        """Whether there is a work target, and it is met."""
        return 0 < self.fma <= self.fma_target

    @property
    def parameters(self) -> int:
        return len(self._plan.store)

    @property
    def rho(self) -> Tensor:
        """The last penalty strength."""
        return self.scalars.rho

    @property
    def skipped(self) -> Tensor:
        """Steps that were not taken because loss or gradient was not a number."""
        return self.scalars.skipped

    @property
    def failing(self) -> Tensor:
        """Those of them in a row up to now."""
        return self.scalars.failing

    def utility(self) -> dict[str, Tensor]:
        """Corrected utility of every index per unit of rho."""
        return self._plan.penalty.utility(self._plan.store.weight)

    @property
    def prices(self) -> dict[str, np.ndarray]:
        """r: what each index saves per token."""
        return self._plan.prices

    def on_drop(self, hook: DropHook) -> DropHook:
        """Register a hook; usable as a decorator.

        It sees each axis's `Drop` before the cut and returns the indices that may go,
        or True (all, also None) or False (none).
        """
        self.hooks.append(hook)
        return hook
