"""The body: a model, what is built on its structure, and the changes that an event makes to it.

Three changes: split, balance, cut. Two ways to undo one: `snapshot_values` where values change in
place, `snapshot_modules` where tensors are replaced. Decides nothing; knows no losses.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gaugelasso.axes import Compressible, named_tensors, on_host
from gaugelasso.compress import gauge, pricing, surgery
from gaugelasso.compress.cuda_graph import GraphedStep
from gaugelasso.compress.drop import Decision
from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.optim import CoupledOptimizer
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.compress.penalty import Penalty
from gaugelasso.compress.split import Split, find_splits, split_
from gaugelasso.compress.step_means import StepMeans
from gaugelasso.distributed import Team, fingerprint

Undo = Callable[[], None]


@dataclass
class PerStructure:
    """What is built anew whenever the structure changes."""

    store: FlatStore
    means: StepMeans
    slow: gauge.SlowNorms
    penalty: Penalty
    balance: gauge.Balance
    links: dict[str, Tensor] = field(repr=False)  # on the CPU, where decisions are made
    prices: dict[str, np.ndarray] = field(repr=False)
    fma: float


class ModelState:
    """A model with its table, its plan and its optimizer, which always fit each other."""

    def __init__(
        self,
        model: Compressible,
        options: CompressorOptions,
        stop_requested: Tensor,
        graph: bool,
        team: Team,
        micros: int,
        canonical: bool,
    ):
        self.model, self.options, self.team = model, options, team
        self._stop_requested, self._micros, self._canonical = stop_requested, micros, canonical
        self._accounting = pricing.ACCOUNTINGS[options.accounting]
        # How often the structure was taken up anew: captures of older ones are void.
        self.rebuilds = 0
        self.table = model.axis_table()
        self.table.check(named_tensors(model))
        self.plan = self._build()
        self.optimizer = CoupledOptimizer(
            self.plan.store,
            self.table.matrices,
            options.optimizer,
            options.beta,
            options.beta_second,
            options.weight_decay,
        )
        # On the device: the balance below reads it also where it is a graph.
        self._least = self.plan.store.weight.new_ones(())
        # Most events change no structure: their thousand launches become one.
        weight = self.plan.store.weight
        here = weight.is_cuda and weight.device.index == torch.cuda.current_device()
        self._balancing = GraphedStep(self._balance_, on=graph and here)

    def work_after(self, decision: Decision) -> float:
        """Work per token once a decision is carried out."""
        widths = {name: int(keep.sum()) for name, keep in decision.keeps.items()}
        return float(pricing.count(self.table, self._accounting, widths))

    def readable(self) -> dict[str, Tensor]:
        """The model's tensors, with those that decisions read on the CPU."""
        tensors = named_tensors(self.model)
        read = [name for norm in self.table.norms for name in (norm.weight, norm.energy)]
        return {**tensors, **self.plan.links, **on_host(tensors, read)}

    # --- changes ------------------------------------------------------------------

    def find_splits(self) -> list[Split]:
        return find_splits(self.table, self.readable(), self.options.split_share)

    def split_(self, splits: list[Split]) -> None:
        split_(self.model, self.table, splits)
        self._rebuild_()

    @property
    def balances(self) -> bool:
        """Whether there is anything for `balance_` to do."""
        anchored = self.options.anchor and self.table.norms
        return bool(self.options.sinkhorn_sweeps or anchored)

    def balance_(self, pressing: bool) -> None:
        """Balance; under pressure normalisers may come down towards their anchors."""
        self._least.fill_(gauge.FALL if pressing else 1.0)
        self._balancing()

    def _balance_(self) -> None:
        optimizer, sweeps = self.optimizer, self.options.sinkhorn_sweeps
        momentum, second = optimizer.momentum, optimizer.second
        states, share = optimizer.states(), self.options.anchor
        least: Tensor | float = self._least
        for _ in range(max(sweeps, 1)):
            if sweeps:
                self.plan.balance.sweep_(self.plan.store.weight, momentum, second)
            if share:
                self.plan.slow.anchor_(states["momentum"], states["second"], share, least)
                least = 1.0  # down once an event

    def cut_(self, decision: Decision, when: str) -> None:
        """Cut model and optimizer; RanksDiffer, saying `when`, unless all ranks cut alike."""
        old, table = self.plan.store, self.table
        staged = surgery.cut(named_tensors(self.model), table, decision.keeps)
        if self.team.size > 1:
            self.team.check_same(fingerprint(staged, decision.removed), when)
        surgery.swap_(self.model, staged, decision.removed)
        alive = {name for name, _ in self.model.named_parameters()}
        self.optimizer.follow_cut_(surgery.kept_elements(old, table, decision.keeps, alive))
        self._rebuild_()

    # --- and how they are taken back ------------------------------------------------

    def snapshot_values(self) -> Undo:
        """Remember all values. The undo copies them back to where they lie: captures hold."""
        optimizer, buffers = self.optimizer, self.model.buffers()
        live = [self.plan.store.weight, optimizer.momentum, optimizer.second]
        live += [buffer for buffer in buffers if buffer.is_floating_point()]
        # Few launches, whatever the number of buffers.
        kept = [torch.empty_like(tensor) for tensor in live]
        torch._foreach_copy_(kept, live)
        return lambda: torch._foreach_copy_(live, kept)

    def snapshot_modules(self) -> Undo:
        """Remember the structure and its tensors, without a copy; the undo takes them up again."""
        put_back, optimizer = surgery.snapshot_modules(self.model), self.optimizer
        state = optimizer.momentum, optimizer.second

        def undo() -> None:
            put_back()
            optimizer.momentum, optimizer.second = state
            self._rebuild_()

        return undo

    # --- the plan -------------------------------------------------------------------

    def _rebuild_(self) -> None:
        """Take up the model's new structure; the optimizer's state must already fit it."""
        self.table = self.model.axis_table()
        self.plan = self._build()
        self.optimizer.attach(self.plan.store, self.table.matrices)
        self.rebuilds += 1
        self._balancing.reset(release=True)

    def _build(self) -> PerStructure:
        options, table = self.options, self.table
        buffers = dict(self.model.named_buffers())
        energies = [buffers[norm.energy] for norm in table.norms]
        extra_elements = StepMeans.extra_elements(energies, self.team, self._canonical)
        store = FlatStore(self.model, table, extra_elements)
        means = StepMeans(
            store, energies, self.team, self._micros, self._canonical, self._stop_requested
        )
        # After the store has put views of itself in the parameters' place.
        tensors = named_tensors(self.model)
        links = on_host(tensors, table.links())
        prices = pricing.prices(table, self._accounting, {**tensors, **links})
        penalty = Penalty(table, tensors, store, prices, options.penalty, options.calibration)
        return PerStructure(
            store=store,
            means=means,
            slow=gauge.SlowNorms(table.norms, tensors, options.powers_of_two),
            penalty=penalty,
            balance=gauge.Balance(table, tensors, penalty.groups, options.powers_of_two),
            links=links,
            prices=prices,
            fma=pricing.total_fma(table, self._accounting, tensors),
        )
