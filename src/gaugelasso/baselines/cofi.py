"""CoFi during training (paper, app. CoFi): masks towards a work or parameter target.

Three phases: warm-up, in which the target falls linearly from the full cost to the requested one;
pruning at that target; and, after the masks are made dense, fine-tuning. The student begins with
the weights of the full model, and learns from it to the end.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gaugelasso.axes import named_tensors
from gaugelasso.baselines.cofi_cost import parameter_terms
from gaugelasso.baselines.cofi_cut import make_dense_
from gaugelasso.baselines.cofi_masks import FAMILIES, Masks
from gaugelasso.baselines.cofi_step import CofiStep
from gaugelasso.baselines.plain_driver import PlainDriver
from gaugelasso.compress.courses.stages import Phase
from gaugelasso.compress.drop import Decision
from gaugelasso.compress.events import Event
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.pricing import Product, count
from gaugelasso.compress.selection import LEAST_SHARE
from gaugelasso.models import Transformer
from gaugelasso.training.records import finite
from gaugelasso.training.run_log import RunLog
from gaugelasso.training.state import RunState

_logger = logging.getLogger(__name__)

Objective = Literal["fma", "parameters"]
# The learning rate of masks and multipliers in CoFi.
MASK_RATE = 0.01
# Logits of masks stay within plus and minus this in CoFi's code.
MASK_BOUND = math.log(100)
# The control moves around its target, and masks are rounded: a cost this much above it has met it.
TOLERANCE = 0.02
# The steps before the end of pruning over which the change of a multiplier is measured.
_WINDOW = 5_000


@dataclass(frozen=True)
class CofiPlan:
    """The requested cost, the lengths of the phases, and the share of distillation in the loss."""

    objective: Objective
    target: float
    warmup: int
    prune: int
    finetune: int
    distill: float
    mask_rate: float = MASK_RATE
    mask_bound: float = MASK_BOUND  # 0 for none
    layer_distill: float = 0.0  # weight of the distance of layers, beside 1 of the loss

    @property
    def dense_at(self) -> int:
        """The step at which masks are made dense."""
        return self.warmup + self.prune

    @property
    def steps(self) -> int:
        return self.dense_at + self.finetune

    @property
    def window(self) -> int:
        return max(1, min(_WINDOW, self.prune // 8))

    @property
    def given(self) -> str:
        """The target as it was typed."""
        return f"--{self.objective} {self.target:g}"

    @property
    def advice(self) -> str:
        """What to change where the target is missed."""
        return (
            f"raise --prune (here {self.prune:,}) or --mask-rate (here {self.mask_rate:g}), to "
            f"give the control more time or a faster step, or give a higher --{self.objective}"
        )

    def is_met(self, reached: float) -> bool:
        return reached <= self.target * (1 + TOLERANCE)

    def is_far_below(self, reached: float) -> bool:
        """Whether it is met by a model of another size than was asked for."""
        return reached < LEAST_SHARE * self.target

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parameters(model: Transformer) -> float:
    """The number of parameters, without the tables of the embedding."""
    table, tensors = model.axis_table(), named_tensors(model)
    return float(count(parameter_terms(table, tensors), table.widths(tensors)))


def reached(state: ModelState, objective: Objective) -> float:
    """The cost of a dense model."""
    model = state.model
    assert isinstance(model, Transformer)
    return state.fma if objective == "fma" else parameters(model)


def cost_terms(state: ModelState, objective: Objective) -> Sequence[Product]:
    """The cost that masks reduce, as products of widths."""
    if objective == "fma":  # by an accounting of work, whose terms are products
        return [term for term in state.plan.terms if isinstance(term, Product)]
    return parameter_terms(state.table, named_tensors(state.model))


class CofiRun(PlainDriver):
    """A run under masks, up to the end of its fine-tuning."""

    def __init__(self, state: RunState, log: "CofiLog", plan: CofiPlan):
        super().__init__(state, log, plan.finetune)
        self.plan = plan
        self.masks: Masks | None = None
        self._saved: Sequence[float] = ()
        # lambda_1 at the start of the window; the control at the last step of pruning.
        self.lambda_before: float | None = None
        self.control: list[float] = []

    def to_dict(self) -> dict[str, Any]:
        masks = list(self._saved) if self.masks is None else self.masks.state()
        own = {"lambda_before": self.lambda_before, "control": self.control, "masks": masks}
        return {**super().to_dict(), **own}

    def load_(self, values: Mapping[str, Any]) -> None:
        super().load_(values)
        self.lambda_before, self.control = values["lambda_before"], list(values["control"])
        self._saved = values["masks"]

    # --- the schedule -----------------------------------------------------------------------

    @property
    def least_end(self) -> int:
        return max(self.plan.steps, self.now + self.finetune)

    def phase(self, step: int) -> Phase:
        if step >= self.plan.dense_at:
            return "cooldown"
        return "warmup" if step < self.plan.warmup else "compression"

    def rate(self, step: int) -> float:
        if self.phase(step) == "cooldown":
            return self.finetuning_rate(step)
        return self.state.config.compress.lr

    def target(self, step: int) -> float:
        """The cost that the masks are held to at a step."""
        assert self.masks is not None
        full, share = self.masks.full, min(1.0, (step + 1) / max(self.plan.warmup, 1))
        return full + (self.plan.target - full) * share

    # --- steps ------------------------------------------------------------------------------

    @property
    def step(self) -> CofiStep:
        step = self.state.step
        assert isinstance(step, CofiStep)
        return step

    def before_step(self) -> None:
        if self.frozen_at is None:
            if self.masks is None:
                self._begin()
            if self.now >= self.plan.dense_at:
                self._make_dense()
            else:
                self._hold()
        super().before_step()

    def _begin(self) -> None:
        """Open all masks, or take over those of a checkpoint."""
        model, seed = self.state.model, self.state.config.train.seed
        assert isinstance(model, Transformer)
        terms = cost_terms(self.compressor.state, self.plan.objective)
        self.masks = Masks(
            model, terms, self.plan.mask_rate, seed, self.plan.mask_bound or math.inf
        )
        if self._saved:
            self.masks.load_(self._saved)

    def _hold(self) -> None:
        assert self.masks is not None
        self.step.masks, self.step.target = self.masks, self.target(self.now)
        if self.now == self.plan.dense_at - self.plan.window:
            self.lambda_before = float(self.masks.multipliers[0].detach())

    def decision_due(self) -> bool:
        return self.frozen_at is None and self.now == self.plan.dense_at

    def decide(self, due: bool) -> bool:
        """Keep the masks that are about to be made dense, for a return."""
        return due

    def go_back_(self, kept: Mapping[str, Any]) -> None:
        """The masks are those of the checkpoint, and what was seen of their control."""
        super().go_back_(kept)
        self.lambda_before = kept["lambda_before"]
        self._saved, self.masks = kept["masks"], None
        if self._saved:  # at once, because the model may be evaluated before the next step
            self._begin()

    def _make_dense(self) -> None:
        assert self.masks is not None
        began, state, before = time.perf_counter(), self.compressor.state, self.compressor.fma
        prices = state.prices
        self.control = [*self.masks.means().values(), *self.masks.multipliers.tolist()]
        cut = make_dense_(state, self.masks)
        self.masks = self.step.masks = None
        self._saved, self.frozen_at = (), self.now
        event = Event(
            step=self.now,
            fma_before=before,
            fma=state.fma,
            dropped=cut.dropped(),
            prices=Decision({name: cut.keeps[name] for name in prices}).saved(prices),
            removed=cut.removed,
            widths=state.widths(),
            seconds=time.perf_counter() - began,
        )
        self.note(event)
        self._check_met(reached(state, self.plan.objective))

    def _check_met(self, found: float) -> None:
        """Warn before the fine-tuning, which cuts nothing, if the target is missed, or far off."""
        if self.plan.is_far_below(found):
            _logger.warning(
                "warning: %s: the masks made dense leave %s, far below that; lower --mask-rate "
                "(here %g) or raise --prune (here %s), so that the control has more time near its "
                "target",
                self.plan.given,
                f"{found:,.0f}",
                self.plan.mask_rate,
                f"{self.plan.prune:,}",
            )
        elif not self.plan.is_met(found):
            _logger.warning(
                "warning: %s is missed: the masks made dense leave %s, and the %s steps of "
                "fine-tuning cut nothing more; %s",
                self.plan.given,
                f"{found:,.0f}",
                f"{self.plan.finetune:,}",
                self.plan.advice,
            )

    def controller(self) -> dict[str, Any]:
        """The control at the last step of pruning, as the paper's table has it."""
        *means, first, second = self.control
        change = None
        if self.lambda_before is not None:
            change = finite(1000 * (first - self.lambda_before) / self.plan.window)
        return {
            "masks": dict(zip(FAMILIES, means, strict=True)),
            "lambda_1": first,
            "lambda_2": second,
            "lambda_1_per_1000_steps": change,
        }


class CofiLog(RunLog):
    """Adds the mean masks, the multipliers and the expected cost to the rows of the pruning."""

    def columns(self) -> dict[str, float]:
        driver = self._state.driver
        assert isinstance(driver, CofiRun)
        if (masks := driver.masks) is None:
            return {}
        first, second = masks.multipliers.tolist()
        means = {f"mask_{family}": value for family, value in masks.means().items()}
        expected = float(masks.expected().detach())
        return {**means, "lambda_1": first, "lambda_2": second, "expected_cost": expected}
