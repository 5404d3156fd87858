"""A model, everything that is built on its structure, and the changes that an event makes to it.

There are four changes: split, balance, cut and growth. `snapshot_values` undoes a change of values
in place, `snapshot_modules` one that replaces tensors. Decides nothing; knows no losses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaugelasso.axes import Compressible, named_tensors, on_host
from gaugelasso.compress import accountings, gauge, growth, pricing, surgery
from gaugelasso.compress.births import BirthRecord
from gaugelasso.compress.drop import Decision
from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.flat_optimizer import FlatOptimizer
from gaugelasso.compress.groups import Groups, weighed_with_riders
from gaugelasso.compress.harm import Harm, levels
from gaugelasso.compress.optimizers import OPTIMIZERS
from gaugelasso.compress.options import CompressorOptions, ExecutionOptions
from gaugelasso.compress.penalty import Penalty
from gaugelasso.compress.shape import check_shape, settle_norms_
from gaugelasso.compress.split import Split, find_splits, split_
from gaugelasso.compress.step_means import StepMeans
from gaugelasso.distributed import Team, fingerprint
from gaugelasso.kernels.cuda_graph import GraphedStep

Undo = Callable[[], None]


@dataclass
class PerStructure:
    """Everything that is built again whenever the structure changes."""

    store: FlatStore
    means: StepMeans
    slow: gauge.SlowNorms
    penalty: Penalty
    balance: gauge.Balance
    links: dict[str, Tensor] = field(repr=False)  # on the CPU, where decisions are made
    prices: dict[str, np.ndarray] = field(repr=False)
    terms: Sequence[pricing.Term] = field(repr=False)
    preferred: dict[str, int]  # the multiples that the device likes, by axis
    fma: float
    training_work: float  # of one token: what a step does, whatever is priced


class ModelState:
    """A model with its table, its plan and its optimizer, which always fit each other.

    `rebuilds` counts how often the structure changed: CUDA graphs of earlier ones are void.
    """

    def __init__(
        self,
        model: Compressible,
        options: CompressorOptions,
        execution: ExecutionOptions,
        team: Team,
    ):
        self.model, self.options, self.team = model, options, team
        self._execution = execution
        self.rebuilds = 0
        self.table = model.axis_table()
        self.table.check(named_tensors(model))
        check_shape(options.shape, self.table, self.widths(), named_tensors(model))
        device = next(model.parameters(), torch.empty(0)).device
        self._timed = accountings.latency(options, device)
        self.cost_model = accountings.chosen(options, self._timed)
        self.plan = self._build()
        self.optimizer = self._new_optimizer()
        self.births: BirthRecord | None = None  # nothing is born without exchange
        if options.exchange:
            seed = team.broadcast(torch.initial_seed())
            self.births = BirthRecord(options.exchange, self.widths(), seed, device)
        by_harm = options.removal == "harm"
        self.harm = Harm(self.plan.penalty, self.plan.store.weight) if by_harm else None
        # On the device, so that a captured balance reads its present value.
        self._least = self.plan.store.weight.new_ones(())
        # Most events change no structure: a graph turns their thousand launches into one.
        weight = self.plan.store.weight
        here = weight.is_cuda and weight.device.index == torch.cuda.current_device()
        self._balancing = GraphedStep(self._balance_, on=execution.graph and here)

    @property
    def collects_microbatches(self) -> bool:
        """Whether `add_microbatch_` takes the gradients, so that parameters have none at a step."""
        return self._execution.canonical

    # --- figures ------------------------------------------------------------------

    @property
    def fma(self) -> float:
        """Work per token, by the chosen accounting."""
        return self.plan.fma

    @property
    def _work_model(self) -> pricing.CostModel:
        """The accounting, if it counts work; bytes and milliseconds of serving are none."""
        counted = self.cost_model
        fma = pricing.ACCOUNTINGS["fma"]
        return counted if isinstance(counted, pricing.Accounting) else fma

    @property
    def parameters(self) -> int:
        return len(self.plan.store)

    @property
    def prices(self) -> dict[str, np.ndarray]:
        """r: axis name -> the work per token that each index saves."""
        return self.plan.prices

    def widths(self) -> dict[str, int]:
        """Axis name -> number of indices."""
        return self.table.widths(named_tensors(self.model))

    def costs(self) -> dict[str, Any]:
        """FMA per token, bytes, and by a profile milliseconds, whatever the accounting is."""
        return accountings.side_by_side(self.model, self.options, self._timed)

    def utility(self) -> dict[str, Tensor]:
        """Axis name -> corrected utility of each index, per unit of rho."""
        return self.plan.penalty.utility(self.plan.store.weight)

    def work_after(self, decision: Decision) -> float:
        """Work per token after the cut that a decision describes."""
        widths = {name: int(keep.sum()) for name, keep in decision.keeps.items()}
        return float(pricing.count(self.plan.terms, widths))

    def readable(self) -> dict[str, Tensor]:
        """The model's tensors; those that decisions read are copies on the CPU."""
        tensors = named_tensors(self.model)
        read = [name for norm in self.table.norms for name in (norm.weight, norm.energy)]
        return {**tensors, **self.plan.links, **on_host(tensors, read)}

    # --- changes ------------------------------------------------------------------

    def find_splits(self) -> list[Split]:
        return find_splits(self.table, self.readable(), self.options.split_share)

    def split_(self, splits: list[Split]) -> None:
        split_(self.model, self.table, splits)
        self.rebuild_()

    @property
    def balances(self) -> bool:
        """Whether `balance_` has anything to do."""
        anchored = self.options.anchor and self.table.norms
        return bool(self.options.sinkhorn_sweeps or anchored)

    def balance_(self, pressing: bool) -> None:
        """Balance all axes; under pressure the levels of normalisers may fall to their anchors."""
        self._least.fill_(gauge.FALL if pressing else 1.0)
        self._balancing()

    def _balance_(self) -> None:
        optimizer, sweeps = self.optimizer, self.options.sinkhorn_sweeps
        store, state, share = self.plan.store, optimizer.state, self.options.anchor
        views = [(vector.power, vector.views(store)) for vector in state]
        least: Tensor | float = self._least
        optimizer.bound_memory_()
        for _ in range(max(sweeps, 1)):
            if sweeps:
                self.plan.balance.sweep_(store.weight, state)
            if share:
                self.plan.slow.anchor_(views, share, least)
                least = 1.0  # a level falls once per event

    def cut_(self, decision: Decision, when: str) -> None:
        """Cut model and optimizer; RanksDiffer, with `when`, unless all ranks cut the same."""
        old, table = self.plan.store, self.table
        old.release_grads_()
        before = levels(table, named_tensors(self.model)) if self.harm is not None else {}
        staged = surgery.cut(named_tensors(self.model), table, decision.keeps)
        if self.team.size > 1:
            self.team.check_same(fingerprint(staged, decision.removed), when)
        surgery.swap_(self.model, staged, decision.removed)
        alive = {name for name, _ in self.model.named_parameters()}
        self.optimizer.follow_cut_(surgery.kept_elements(old, table, decision.keeps, alive))
        del old, staged  # the new plan needs their memory
        if self.births is not None:
            self.births.cut_(decision.keeps)
        self.rebuild_(fresh=False)
        if self.harm is not None:
            self.harm.follow_cut_(self.plan.penalty, decision.keeps)
            settle_norms_(self.options.shape, self.table, named_tensors(self.model), before)

    def grow_(
        self, births: growth.Births, generator: torch.Generator, when: str, step: int = 0
    ) -> None:
        """Add indices to axes of model and optimizer; with exchange, silent ones are protected.

        RanksDiffer, with `when`, unless all ranks grow the same.
        """
        vectors = self.optimizer.state
        states = [(vector.power, vector.views(self.plan.store)) for vector in vectors]
        grown = growth.grow(named_tensors(self.model), self.table, births, generator, states)
        if self.team.size > 1:
            self.team.check_same(fingerprint(grown.tensors), when)
        surgery.swap_(self.model, grown.tensors)
        for vector, views in zip(vectors, grown.states, strict=True):
            parts = [view.reshape(-1) for view in views.values()]
            vector.values = torch.cat(parts) if parts else vector.values
        if self.births is not None:
            silent = {n: k for n, k in births.items() if self.table[n].growth != "linear"}
            self.births.grow_(growth.grown_widths(self.table, silent), step)
        self.rebuild_()

    # --- undo -----------------------------------------------------------------------

    def snapshot_values(self) -> Undo:
        """Copy all values. The undo writes them back in place, so CUDA graphs stay valid."""
        live = [self.plan.store.weight, *(vector.values for vector in self.optimizer.state)]
        live += [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        # Few launches for any number of buffers.
        saved = [torch.empty_like(tensor) for tensor in live]
        torch._foreach_copy_(saved, live)
        return lambda: torch._foreach_copy_(live, saved)

    def snapshot_modules(self) -> Undo:
        """Keep the structure and its tensors, without a copy; the undo puts them back."""
        restore = surgery.snapshot_modules(self.model)
        state = [(vector, vector.values) for vector in self.optimizer.state]
        births = self.births.snapshot() if self.births is not None else {}
        harm = None if self.harm is None else self.harm.values

        def undo() -> None:
            restore()
            if self.births is not None:
                self.births.restore_(births)
            for vector, values in state:
                vector.values = values
            self.rebuild_(fresh=False)
            if self.harm is not None:
                self.harm.restore_(harm, self.plan.penalty)

        return undo

    def replaced_(self) -> None:
        """The model was replaced by another of its class: build on it, with an empty state."""
        self.rebuild_()
        self.optimizer = self._new_optimizer()

    def _new_optimizer(self) -> FlatOptimizer:
        keys = ("beta", "beta_second", "weight_decay")
        settings = {key: getattr(self.options, key) for key in keys}
        return OPTIMIZERS[self.options.optimizer](self.plan.store, self.table.matrices, **settings)

    # --- the plan -------------------------------------------------------------------

    def rebuild_(self, fresh: bool = True) -> None:
        """Build the plan of a new structure, to which the optimizer's state fits already.

        `fresh`: nothing is known of the harm of its indices.
        """
        self.table = self.model.axis_table()
        # First, so that the memory of the old plan serves the new one.
        self._balancing.reset(release=True)
        self.optimizer.detach()
        del self.plan
        self.plan = self._build()
        if self.births is not None:
            self.births.fit_(self.widths())
        if self.harm is not None and fresh:
            self.harm.attach(self.plan.penalty)
        self.optimizer.attach(self.plan.store, self.table.matrices)
        self.rebuilds += 1

    def _build(self) -> PerStructure:
        options, table = self.options, self.table
        buffers = dict(self.model.named_buffers())
        energies = [buffers[norm.energy] for norm in table.norms]
        extra_elements = StepMeans.extra_elements(energies, self.team, self._execution)
        store = FlatStore(self.model, table, extra_elements)
        means = StepMeans(store, energies, self.team, self._execution)
        # Read after the store has replaced the parameters by views of itself.
        tensors = named_tensors(self.model)
        links = on_host(tensors, table.links())
        prices = pricing.prices(table, self.cost_model, {**tensors, **links})
        terms = self.cost_model.terms(table, tensors)
        penalty = Penalty(table, tensors, store, prices, options.penalty, options.calibration)
        weighed = weighed_with_riders(table, tensors)
        groups = penalty.groups if weighed is table else Groups(weighed, tensors, store)
        return PerStructure(
            store=store,
            means=means,
            slow=gauge.SlowNorms(table.norms, tensors, options.powers_of_two),
            penalty=penalty,
            balance=gauge.Balance(weighed, tensors, groups, options.powers_of_two),
            links=links,
            prices=prices,
            terms=terms,
            preferred=self.cost_model.preferred(table),
            fma=float(pricing.count(terms, table.widths(tensors))),
            training_work=pricing.total_fma(table, self._work_model, tensors),
        )
