"""The conductor: the order of one step and of one structural event. No mathematics here.

    compressor = Compressor(model, loss_target=0.05)
    for inputs, targets in data:
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        compressor.step(loss)

The compressor owns the optimizer: it takes the step and clears the gradients.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gaugelasso import gauge, pricing
from gaugelasso.accord import fingerprint, shared_decision, shared_keeps
from gaugelasso.axes import Compressible, named_tensors, on_host
from gaugelasso.drop import Decision, channel_rms, ruling, settle, spare_missed, trust_drop
from gaugelasso.errors import UserError
from gaugelasso.events import Drop, DropHook, Event, allowed_indices
from gaugelasso.graph import GraphedStep
from gaugelasso.means import StepMeans
from gaugelasso.optim import CoupledOptimizer
from gaugelasso.options import CompressorOptions
from gaugelasso.pace import Pace
from gaugelasso.penalty import Penalty
from gaugelasso.ranks import ALONE, Team
from gaugelasso.solver import RhoSolver
from gaugelasso.split import find_splits, split_
from gaugelasso.storage import FlatStore
from gaugelasso.surgery import cut, kept_elements, swap_


@dataclass
class _Plan:
    """What is built anew whenever the structure changes."""

    store: FlatStore
    means: StepMeans
    slow: gauge.SlowNorms
    penalty: Penalty
    balance: gauge.Balance
    links: dict[str, Tensor] = field(repr=False)  # on the CPU, where decisions are made
    prices: dict[str, np.ndarray] = field(repr=False)
    fma: float


class Compressor:
    """Shrinks `model` while it trains, holding `loss_target`.

    `probe`, if given, returns the loss of the current batch without gradients. It is
    called at each event: before and after, so that the event's cost is on record, and
    with the candidates silenced, so that nothing is cut that the batch misses by more
    than `drop_tolerance` times the target. `graph` lets a GPU repeat the balance as a CUDA
    graph.

    With a `team` every rank has a compressor of the same model, calls it as often, and has a
    `probe` that returns the same everywhere: gradients, losses and energies are averaged over
    ranks, rank 0 decides. Micro-batches are told one by one (`note_`) if their number is given.
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
    ):
        self.model = model
        self.options = options or CompressorOptions()
        self.accounting = pricing.ACCOUNTINGS[self.options.accounting]
        self.solver = RhoSolver(self.options.solver, loss_target, self.options.rho)
        self.probe, self.team = probe, team
        self._micros, self._canonical = micros, canonical
        self.history: list[Event] = []
        self.hooks: list[DropHook] = []
        self.steps = 0
        # How often the structure was taken up anew: captures of older ones are void.
        self.rebuilds = 0
        self._held: dict[str, float] = {}
        # Above 0 once any rank has wished to stop, and a step has brought the others word of it.
        self.wish = torch.zeros((), device=next(model.parameters()).device)
        self.table = model.axis_table()
        self.table.check(named_tensors(model))
        self._plan = self._build()
        weight = self._plan.store.weight
        self.optimizer = CoupledOptimizer(
            self._plan.store,
            self.table.matrices,
            self.options.optimizer,
            self.options.beta,
            self.options.beta_second,
            self.options.weight_decay,
        )
        # `norm_rate` is what slow weights follow in one interval; this is one step's share.
        norm_rate = 1 - (1 - self.options.norm_rate) ** (1 / self.options.interval)
        self.pace = Pace(weight, self.solver, self.options.loss_smoothing, norm_rate)
        self.set_lr_(self.options.lr)
        # Most events change no structure: their thousand launches become one.
        here = weight.is_cuda and weight.device.index == torch.cuda.current_device()
        self._balancing = GraphedStep(self._balance_, on=graph and here)
        self.fma_initial = self.fma

    # --- one step ---------------------------------------------------------------

    def step(self, loss: Tensor) -> Event | None:
        """Take one optimizer step after `loss.backward()`; every `interval` steps also an event."""
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
        sound = self.pace.judge_(loss, store.grad)
        optimizer.observe_(sound)
        norms = self._plan.penalty.norms(store.weight)
        gradient = self._plan.penalty.gradient(store.weight, norms)
        lr, norm_rate = self.pace.press_(optimizer.momentum, gradient, sound)
        optimizer.step_(gradient, self.pace.rho, lr, self._bounded_rate(norms, lr))
        self._plan.slow.follow_(norm_rate)
        return loss

    @torch.no_grad()
    def note_(self, micro: int, loss: Tensor) -> None:
        """One of several micro-batches has been through its backward pass."""
        self._plan.means.note_(micro, loss)

    def _bounded_rate(self, norms: Tensor, lr: Tensor) -> Tensor | None:
        """The elementwise path's rates, less for groups they would change too much, if bounded."""
        bound = self.options.relative_step
        if not bound:
            return None
        return self._plan.penalty.bounded_rate(norms, lr, bound, self.optimizer.matrix_end)

    def finish_step_(self) -> Event | None:
        """The host's part of a step: count, and hold an event when one is due."""
        self.steps += 1
        if self.steps % self.options.interval or not bool(self.pace.pressed):
            return None
        self.pace.pressed.zero_()
        return self.event_()

    def press_(self, share: float) -> None:
        """Press with a share of the strength that the margin allows; 0: plain training."""
        if self._changes("pressure", float(share)):
            self.pace.pressure.fill_(float(share))
            if not share:
                self.pace.pressed.zero_()

    def set_lr_(self, lr: float) -> None:
        if self._changes("lr", lr):
            self.pace.lr.fill_(lr)

    def _changes(self, name: str, value: float) -> bool:
        """Whether a device scalar was not set to this value last: if not, a launch is saved."""
        before, self._held[name] = self._held.get(name), value
        return before != value

    # --- one structural event ---------------------------------------------------

    @torch.no_grad()
    def event_(self) -> Event:
        """Split, balance, decide, cascade, cut."""
        began = time.perf_counter()
        self.agree(f"before the event of step {self.steps}")
        fma_before, loss_before = self.fma, self._probe()
        splits = find_splits(self.table, self._readable(), self.options.split_share)
        if splits:
            split_(self.model, self.table, splits)
            self._rebuild_()
        if self._balances:
            self._balancing()
        loss_balanced = self._probe()
        readable, prices = self._readable(), self._plan.prices
        rms = channel_rms(self._plan.penalty.groups, self._plan.store.weight)
        candidates = shared_keeps(self.team, lambda: self._candidates(readable, prices, rms))
        keeps = self._spare(candidates, loss_balanced)
        decision = shared_decision(
            self.team, lambda: settle(self.table, readable, keeps, rms, self.options.multiple)
        )
        dropped = decision.dropped() if decision else {}
        spent = (
            {name: float(prices[name][~decision.keeps[name].numpy()].sum()) for name in dropped}
            if decision
            else {}
        )
        if decision and dropped:
            self._cut_(decision)
        event = Event(
            step=self.steps,
            fma_before=fma_before,
            fma=self.fma,
            dropped=dropped,
            prices=spent,
            removed=decision.removed if decision else (),
            widths=self.widths,
            seconds=time.perf_counter() - began,
            loss_before=loss_before,
            loss_balanced=loss_balanced,
            loss_after=self._probe() if dropped else loss_balanced,
            refused=decision is None,
            splits=len(splits),
            spared={
                name: number
                for name, keep in keeps.items()
                if (number := int((keep & ~candidates[name]).sum()))
            },
        )
        self.history.append(event)
        return event

    def _readable(self) -> dict[str, Tensor]:
        """The model's tensors, with those that decisions read on the CPU."""
        tensors = named_tensors(self.model)
        read = [name for norm in self.table.norms for name in (norm.weight, norm.energy)]
        return {**tensors, **self._plan.links, **on_host(tensors, read)}

    @property
    def _balances(self) -> bool:
        anchored = self.options.anchor and self.table.norms
        return bool(self.options.sinkhorn_sweeps or anchored)

    def _balance_(self) -> None:
        optimizer, sweeps = self.optimizer, self.options.sinkhorn_sweeps
        states = optimizer.states()
        for _ in range(max(sweeps, 1)):
            if sweeps:
                weight = self._plan.store.weight
                self._plan.balance.sweep_(weight, optimizer.momentum, optimizer.second)
            if self.options.anchor:
                self._plan.slow.anchor_(states["momentum"], states["second"], self.options.anchor)

    def _candidates(
        self,
        readable: dict[str, Tensor],
        prices: dict[str, np.ndarray],
        rms: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Keep-sets by trust-drop, in multiples, after the hooks have had their say."""
        held = ruling(self.table, readable)
        keeps = trust_drop(self.table, rms, self.options.trust * float(self.pace.lr), held)
        multiple = self.options.multiple
        if multiple > 1 and (likely := settle(self.table, readable, keeps, rms, multiple)):
            # Hooks and guard should not be asked about what would stay anyway.
            keeps = {name: keep | likely.keeps[name] for name, keep in keeps.items()}
        for name, keep in keeps.items():
            for hook in self.hooks:
                going = (~keep).nonzero().squeeze(1)
                if not len(going):
                    break
                drop = Drop(
                    self.steps,
                    name,
                    tuple(going.tolist()),
                    tuple(rms[name][going].tolist()),
                    tuple(prices[name][going.numpy()].tolist()),
                )
                allowed = allowed_indices(hook(drop), drop)
                keep[[i for i in drop.indices if i not in allowed]] = True
        return keeps

    def _spare(self, keeps: dict[str, Tensor], loss: float | None) -> dict[str, Tensor]:
        if loss is None:
            return keeps
        if not math.isfinite(loss):
            return {name: torch.ones_like(keep) for name, keep in keeps.items()}
        bound = loss + self.options.drop_tolerance * abs(self.solver.loss_target)
        return spare_missed(self.table, named_tensors(self.model), keeps, self._measure, bound)

    def _cut_(self, decision: Decision) -> None:
        old, table = self._plan.store, self.table
        staged = cut(named_tensors(self.model), table, decision.keeps)
        if self.team.size > 1:
            digest = fingerprint(staged, decision.removed)
            self.team.agree(digest, f"after the cut of step {self.steps}")
        swap_(self.model, staged, decision.removed)
        alive = {name for name, _ in self.model.named_parameters()}
        self.optimizer.follow_cut_(kept_elements(old, table, decision.keeps, alive))
        self._rebuild_()

    def _rebuild_(self) -> None:
        """Take up the model's new structure; the optimizer's state must already fit it."""
        self.table = self.model.axis_table()
        self._plan = self._build()
        self.optimizer.attach(self._plan.store, self.table.matrices)
        self.rebuilds += 1
        self._balancing.reset(release=True)

    def _build(self) -> _Plan:
        buffers = dict(self.model.named_buffers())
        energies = [buffers[norm.energy] for norm in self.table.norms]
        room = StepMeans.room(energies, self.team, self._canonical)
        store = FlatStore(self.model, self.table, room)
        means = StepMeans(store, energies, self.team, self._micros, self._canonical, self.wish)
        # After the store has put views of itself in the parameters' place.
        tensors = named_tensors(self.model)
        links = on_host(tensors, self.table.links())
        prices = pricing.prices(self.table, self.accounting, {**tensors, **links})
        penalty = Penalty(
            self.table, tensors, store, prices, self.options.penalty, self.options.calibration
        )
        return _Plan(
            store=store,
            means=means,
            slow=gauge.SlowNorms(self.table.norms, tensors, self.options.powers_of_two),
            penalty=penalty,
            balance=gauge.Balance(self.table, tensors, penalty.groups, self.options.powers_of_two),
            links=links,
            prices=prices,
            fma=pricing.total_fma(self.table, self.accounting, tensors),
        )

    def _probe(self) -> float | None:
        return self._measure() if self.probe else None

    def _measure(self) -> float:
        """The probe's loss, with the model not keeping statistics of its inputs."""
        assert self.probe is not None
        training = self.model.training
        self.model.eval()
        try:
            return self.probe()
        finally:
            self.model.train(training)

    # --- state, for checkpoints ---------------------------------------------------

    def _scalars(self) -> dict[str, Tensor]:
        return {**self.pace.state(), "decay": self.optimizer.decay}

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
        self._held.clear()
        self.steps = steps

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

    def agree(self, when: str) -> None:
        """RanksDiffer unless all ranks stand where rank 0 does; `when` says at what point."""
        if self.team.size > 1:
            tensors = {**named_tensors(self.model), **self.state_tensors()}
            self.team.agree(fingerprint(tensors, self.steps, self.structure), when)

    # --- what users look at -----------------------------------------------------

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
    def parameters(self) -> int:
        return len(self._plan.store)

    @property
    def rho(self) -> Tensor:
        """The last penalty strength."""
        return self.pace.rho

    @property
    def skipped(self) -> Tensor:
        """Steps that were not taken because loss or gradient was not a number."""
        return self.pace.skipped

    @property
    def failing(self) -> Tensor:
        """Those of them in a row up to now."""
        return self.pace.failing

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
