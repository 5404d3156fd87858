"""Checks of what a training loop passes to a compressor: each error says what would be right.

All of them run on the host and read no value from the device. The trainer calls the halves of a
step itself and does not pay for the checks of a step.
"""

import logging
import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from torch import Tensor, nn

from gaugelasso.axes import AxisTable, Compressible
from gaugelasso.compress import accountings
from gaugelasso.compress.courses.metric_target import MetricTarget
from gaugelasso.compress.courses.stages import LEAST_STEPS, TICKS
from gaugelasso.compress.growth import can_grow
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.options import CompressorOptions
from gaugelasso.errors import UserError

_log = logging.getLogger(__name__)
# So many steps in a row find weights that something else has changed: an optimizer does that at
# every step, a loop that loads or initialises weights does not.
_FOREIGN_STEPS = 3


def check_number(name: str, value: Any, least: float = -math.inf) -> None:
    """TypeError unless the value is a number, UserError unless it is finite and not below."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} = {value!r}: must be a number, not {type(value).__name__}")
    if not math.isfinite(value) or value < least:
        above = "" if least == -math.inf else f" of {least:g} or more"
        raise UserError(f"{name} = {value}: must be a finite number{above}")


def check_options(options: Any, probe: Any) -> None:
    """TypeError unless these are options and a function, or None."""
    if options is not None and not isinstance(options, CompressorOptions):
        raise TypeError(f"options = {options!r}: must be a CompressorOptions")
    if probe is not None and not callable(probe):
        raise TypeError(f"probe = {probe!r}: must be a function that returns a loss")


def check_targets(
    loss: Any, metric: Any, fma: Any, length: float | None, evaluate: Any
) -> MetricTarget | None:
    """The metric to reach, if one is; UserError if the targets do not go together.

    `length` is the number of steps or seconds. A metric or a work target may join a loss.
    """
    check_number("fma_target", fma, least=0)
    if loss is not None:
        check_number("loss_target", loss)
    if metric is None:
        if loss is not None:
            return None
        if not fma:
            raise UserError(
                "what should the final model have? give loss_target=..., or, with steps=..., "
                "metric_target=... or fma_target=..."
            )
        if length is None:
            raise UserError(
                f"fma_target = {fma:g} without loss_target needs the length of the run: give "
                "steps=... as well"
            )
        return None
    if fma:
        raise UserError(f"metric_target and fma_target = {fma:g}: give one of them")
    if length is None or evaluate is None:
        raise UserError(
            "metric_target needs steps=... and evaluate=..., a function that returns the loss and "
            "the metric on held-out data"
        )
    metric = metric if isinstance(metric, MetricTarget) else MetricTarget(metric)
    check_number("metric_target", metric.value)
    if metric.loss != math.inf:
        check_number("the loss of metric_target", metric.loss)
    return metric


def check_length(
    steps: Any,
    seconds: Any,
    evaluate: Any = None,
    record: Any = None,
    resume: bool = False,
    ranks: int = 1,
) -> int:
    """The length of a run in steps, or in ticks of its time; 0 if neither is given."""
    if steps is None and seconds is None:
        for name, value in {"evaluate": evaluate, "record": record}.items():
            if value is not None:
                raise UserError(f"{name} needs the length of the run: give steps=... as well")
        return 0
    if resume and (record is None or seconds is not None):
        raise UserError("resume needs steps=... and record=..., the folder of the run")
    if steps is not None and seconds is not None:
        raise UserError("give either steps or seconds, not both")
    if evaluate is not None and not callable(evaluate):
        raise TypeError(f"evaluate = {evaluate!r}: must be a function that returns a loss")
    if seconds is not None:
        check_number("seconds", seconds)
        if seconds <= 0:
            raise UserError(f"seconds = {seconds}: must be more than 0")
        if ranks > 1:
            raise UserError(
                f"seconds = {seconds}: each of the {ranks} ranks would decide by its own clock; "
                "with a team give steps=..."
            )
        return TICKS
    if not isinstance(steps, Integral) or isinstance(steps, bool) or steps < LEAST_STEPS:
        raise UserError(f"steps = {steps!r}: must be a whole number of at least {LEAST_STEPS}")
    return int(steps)


def check_model(model: Any) -> None:
    """TypeError unless the model is a Compressible that defines its methods."""
    if not isinstance(model, Compressible):
        # The name under which torch.compile keeps the model.
        if isinstance(model, nn.Module) and "_orig_mod" in dict(model.named_children()):
            raise TypeError(
                f"{type(model).__name__} is what torch.compile returned: give the compressor the "
                "model itself, and call the compiled one in the loop"
            )
        raise TypeError(
            f"{type(model).__name__} does not say what can be cut out of it: give a "
            "gaugelasso.Transformer, or a Compressible of your own (docs/how-to/own-model.md)"
        )
    missing = [name for name in ("axis_table", "structure") if not _defines(model, name)]
    if not missing and not _defines(model, "remove_operator"):
        removable = removable_owners(model.axis_table())
        missing += ["remove_operator"] if removable else []
    if missing:
        methods = " and ".join(f"{name}()" for name in missing)
        raise TypeError(
            f"{type(model).__name__} does not define {methods}; a Compressible must "
            "(docs/how-to/own-model.md)"
        )


def _defines(model: Compressible, method: str) -> bool:
    inherited = getattr(type(model), method) is getattr(Compressible, method)
    return method in vars(model) or not inherited


def removable_owners(table: AxisTable) -> set[str]:
    """The operators that an event may remove."""
    return set(table.owners()) - set(table.required)


def check_prices(state: ModelState) -> None:
    """UserError if there are indices to remove, and none of them has a price."""
    prices = list(state.prices.values())
    if any(len(price) for price in prices) and not any((price > 0).any() for price in prices):
        raise UserError(
            f"no index has a price under the accounting {state.options.accounting!r}, so nothing "
            "would be removed: declare the work in the axis table, as in "
            "costs=(Cost('matmul', factor, ('axis',)),)"
        )


def check_work_target(
    name: str, target: float, model: Compressible, options: CompressorOptions
) -> None:
    """UserError if no cut of the model leads to so little; 0 names nothing."""
    if target and target < (least := accountings.least_work(model, options)):
        unit = accountings.chosen(options, None).unit
        raise UserError(
            f"{name} = {target:g}: no cut leads below {least:,.0f} {unit}, what the parts "
            "that must stay cost with one channel each; name more"
        )


def check_exchange(state: ModelState) -> None:
    """UserError if channels are to be exchanged, and the model or the accounting does not allow it.

    The times of a profile end at the widths that it was measured for.
    """
    every, table = state.options.exchange, state.table
    if every and state.options.accounting == "latency":
        raise UserError(
            f"compress.exchange = {every}: a profile has no times of axes that grow; use the "
            "accounting fma, paper or bytes, or exchange = 0"
        )
    if every and not any(can_grow(table, axis) for axis in table.axes):
        raise UserError(
            f"compress.exchange = {every}: the axis table of {type(state.model).__name__} does not "
            "say how an axis may grow; declare Axis(growth=...), or use exchange = 0"
        )


def backward_of(
    closure: Callable[[], Any], state: ModelState
) -> tuple[Tensor, Callable[[], float]]:
    """The loss that the function given to `step` returns, after its backward pass; and the probe.

    TypeError unless it is a loss. UserError if parameters have gradients already: those of the
    batch would be added to them.
    """
    loss = closure()
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise TypeError(
            f"the function given to step returned {loss!r}; it must return the loss of the "
            "batch, a tensor with a gradient"
        )
    _check_one_number("the function given to step must return the loss", loss)
    if state.plan.store.has_grads():
        raise UserError(
            "parameters have gradients before step runs its backward pass: the function given to "
            "step returns the loss and must not call backward(); after a backward pass of your "
            "own, in an evaluation for instance, call model.zero_grad()"
        )
    _check_mode(state.model)
    try:
        loss.backward()
    except BaseException:  # also Ctrl-C, after which a notebook may go on with the next step
        state.model.zero_grad()
        raise
    return loss, lambda: float(closure())


def _check_one_number(wanted: str, loss: Tensor) -> None:
    if loss.numel() != 1 or not loss.is_floating_point():
        raise UserError(
            f"{wanted} as one number, not a {loss.dtype} tensor of shape {tuple(loss.shape)}; "
            "average it first, as in loss.mean()"
        )


def _check_mode(model: Compressible) -> None:
    if not model.training:
        raise UserError(
            "the model is in eval mode, in which it does not measure what a step needs; call "
            "model.train() before the forward pass"
        )


class StepChecks:
    """What must be true before each step of a training loop."""

    def __init__(self, state: ModelState, loss_target: float):
        self._state, self._loss_target = state, loss_target
        self._version: int | None = None
        self._foreign = 0

    def before_step(self, loss: Any, thorough: bool) -> None:
        """Check one call of `step`; `thorough` looks at every parameter."""
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"step wants the loss that backward was called on, a tensor, not {loss!r}"
            )
        _check_one_number("step wants the loss", loss)
        model, store = self._state.model, self._state.plan.store
        _check_mode(model)
        graded = store.has_grads() or self._state.collects_microbatches
        look = thorough or not graded or store.converted()
        if look and (name := store.separated(model)) is not None:
            raise UserError(
                f"parameter {name!r} was converted, moved or replaced after the compressor was "
                "created, so a step would not train it; call model.to(...) first, then create "
                "the compressor, and write values in place"
            )
        if not graded:
            raise UserError(
                "no parameter has a gradient; call loss.backward() before step, and step once "
                "for each time, because it clears the gradients"
            )
        self._check_foreign(store.weight)
        if self._version is None and self._loss_target < 0:
            _log.warning(
                "warning: loss_target = %g is below zero; a cross-entropy or squared error never "
                "gets there, so that nothing would be removed",
                self._loss_target,
            )

    def _check_foreign(self, weight: Tensor) -> None:
        """UserError if something else has changed the weights between several steps in a row."""
        changed = self._version is not None and weight._version != self._version
        self._foreign = self._foreign + 1 if changed else 0
        if self._foreign >= _FOREIGN_STEPS:
            raise UserError(
                f"something else changed the weights before each of the last {self._foreign} "
                "steps; the compressor is the optimizer, so remove your own optimizer's step()"
            )

    def after_step(self) -> None:
        """Remember the weights as the compressor leaves them."""
        self._version = self._state.plan.store.weight._version
