"""Post-hoc pruning (paper, app. post-hoc): a trained model, pruned in rounds, then fine-tuned.

A round removes the least efficient channels and takes corrective steps at the least learning rate.
Channels are ranked with all axes balanced; the cut and the steps are made in the model's own gauge.
With a loss ceiling, rounds go on until the held-out loss exceeds it; the last round is then undone.
With a work target, each round prunes to a work that is interpolated linearly. Fine-tuning follows a
cosine. There is no pressure at any time.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from gaugelasso.baselines.efficiency import EfficiencyRanking, balanced
from gaugelasso.baselines.plain_driver import PlainDriver
from gaugelasso.compress.courses.stages import Phase
from gaugelasso.compress.courses.window import Measured
from gaugelasso.compress.drop import Decision
from gaugelasso.compress.events import Event
from gaugelasso.compress.model_state import Undo
from gaugelasso.compress.selection import LEAST_SHARE
from gaugelasso.errors import UserError
from gaugelasso.runs.units import amount
from gaugelasso.training.run_log import RunLog
from gaugelasso.training.state import RunState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrunePlan:
    """How to prune: to a loss ceiling, or in `rounds` rounds to a work per token.

    `channels` is the number that a round removes, with a loss ceiling. `corrective` steps follow
    each round, `finetune` steps the last one.
    """

    loss: float | None
    fma: float | None
    rounds: int
    channels: int
    corrective: int
    finetune: int

    @property
    def steps(self) -> int:
        """The steps of all rounds and of the fine-tuning; with a ceiling, of one round at least."""
        rounds = 1 if self.fma is None else self.rounds
        return rounds * self.corrective + self.finetune

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class PruneRun(PlainDriver):
    """`measure()` gives the loss on selection data, which the ceiling holds for.

    `ranks_balanced` says whether channels are ranked with all axes balanced.
    """

    ranks_balanced: ClassVar[bool] = True

    def __init__(
        self, state: RunState, log: RunLog, plan: PrunePlan, measure: Callable[[], Measured]
    ):
        super().__init__(state, log, plan.finetune)
        self.plan, self._measure = plan, measure
        self.rounds = 0  # those that stand
        self._round_ends_at: int | None = None
        self._undo: Undo = lambda: None

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "rounds": self.rounds}

    # --- the schedule -----------------------------------------------------------------------

    @property
    def least_end(self) -> int:
        return max(self.plan.steps, self.now + self.finetune)  # more rounds may follow

    def phase(self, step: int) -> Phase:
        frozen = self.frozen_at is not None and step >= self.frozen_at
        return "cooldown" if frozen else "compression"

    def rate(self, step: int) -> float:
        if self.phase(step) == "cooldown":
            return self.finetuning_rate(step)
        return self.state.config.train.lr_min

    @property
    def settled(self) -> bool:
        """Within a round the state before it is in memory only, so no checkpoint is written."""
        return self._round_ends_at is None or self._round_ends_at == self.now

    # --- rounds -----------------------------------------------------------------------------

    @property
    def round_due(self) -> bool:
        """Whether a round begins before the next step."""
        return self.frozen_at is None and self._round_ends_at is None

    def before_step(self) -> None:
        if self.round_due:
            self._begin_round()
        super().before_step()

    def _begin_round(self) -> None:
        """Rank and cut; the fine-tuning begins here if there is nothing to cut."""
        state, began = self.compressor.state, time.perf_counter()
        before, fma, prices = self._probe(), state.fma, state.prices
        work = self._round_work()
        with balanced(state) if self.ranks_balanced else contextlib.nullcontext():
            loss_balanced = self._probe() if self.ranks_balanced else None
            decision = self._choose(work)
        if work is not None and (nearest := state.work_after(decision)) > work:
            self._refuse(nearest)
        if not decision.dropped():
            if work is None:
                self.frozen_at = self.now
            else:  # an earlier round went below the work of this one
                self._round_ends_at = self.now + self.plan.corrective
            return
        self._undo = state.snapshot_modules()
        self._cut_before_at = self.state.record.cut_at
        state.cut_(decision, f"in the round at step {self.now}")
        self._warn_far_below(fma)
        self._round_ends_at = self.now + self.plan.corrective
        self.note(
            Event(
                step=self.now,
                fma_before=fma,
                fma=state.fma,
                dropped=decision.dropped(),
                prices=decision.saved(prices),
                removed=decision.removed,
                widths=state.widths(),
                seconds=time.perf_counter() - began,
                loss_before=before,
                loss_balanced=loss_balanced,
                loss_after=self._probe(),
            )
        )

    def _warn_far_below(self, before: float) -> None:
        """Warn of a round that left far less than the named work, as no nearer one was found."""
        named, left = self.plan.fma, self.compressor.fma
        if named is not None and left < LEAST_SHARE * named <= before:
            _log.warning(
                "warning: --fma %g: the round at step %d leaves %s, far below that; no choice of "
                "channels in the order of the method is nearer",
                named, self.now, amount(left, self.state.config.compress.accounting),
            )  # fmt: skip

    def _refuse(self, nearest: float) -> None:
        """The work was in reach at the start, and the cuts since then have lost it."""
        reached = amount(nearest, self.state.config.compress.accounting)
        raise UserError(
            f"--fma {self.plan.fma:g} cannot be reached from the model of step {self.now}, which "
            f"the rounds before led to: the nearest is {reached}. Name more, or fewer --rounds, "
            "with another --out"
        )

    def _round_work(self) -> float | None:
        """The work that this round prunes to; None with a loss ceiling."""
        if self.plan.fma is None:
            return None
        full, share = self.state.record.fma_initial, (self.rounds + 1) / self.plan.rounds
        return full + (self.plan.fma - full) * share

    def _choose(self, work: float | None) -> Decision:
        if work is None:
            return EfficiencyRanking(self.compressor.state).next(self.plan.channels)
        return self.drops_to(work)

    def drops_to(self, work: float) -> Decision:
        """What to remove for this work per token, or all that can be removed.

        A round goes below the named work by no more than training to a work does, if it can.
        """
        least = LEAST_SHARE * (self.plan.fma or 0.0)
        return EfficiencyRanking(self.compressor.state).to_work(work, least)

    def _probe(self) -> float | None:
        """The loss of the last batch."""
        return self.compressor.probe() if self.compressor.probe else None

    def decision_due(self) -> bool:
        return self._round_ends_at == self.now

    def decide(self, due: bool) -> bool:
        if not due or self._round_ends_at is None:  # a return has undone the round
            return False
        plan = self.plan
        if plan.loss is not None and not self._measure().loss <= plan.loss:
            self._undo_round()
            self.frozen_at = self.now
        else:
            self.rounds += 1
            if plan.fma is not None and self.rounds == plan.rounds:
                self.frozen_at = self.now
        self._round_ends_at, self._undo = None, lambda: None
        return False

    def _undo_round(self) -> None:
        began, fma, cut_at = time.perf_counter(), self.compressor.fma, self.state.record.cut_at
        self._undo()
        state = self.compressor.state
        seconds = time.perf_counter() - began
        event = Event.returned(self.now, cut_at, fma, state.fma, state.widths(), seconds)
        self.note(event)
        self.state.record.cut_at = self._cut_before_at
        self.returns += 1

    def load_(self, values: Mapping[str, Any]) -> None:
        super().load_(values)
        self.rounds = values["rounds"]

    def go_back_(self, kept: Mapping[str, Any]) -> None:
        """No round is open in a checkpoint."""
        super().go_back_(kept)
        self.rounds, self._round_ends_at, self._undo = kept["rounds"], None, lambda: None
