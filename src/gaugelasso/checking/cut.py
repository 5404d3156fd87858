"""Zero-then-drop: what is zero on both sides can be cut, and an emptied operator is silent."""

import copy

import torch
from torch import Tensor, nn

from gaugelasso.axes import Axis, Compressible, named_tensors, width
from gaugelasso.checking.result import Finding, failed, passed
from gaugelasso.checking.subject import (
    TOLERANCE,
    Keeps,
    Subject,
    all_kept,
    describe,
    difference,
    reason,
    scale_,
    silence_,
)
from gaugelasso.compress.drop import Decision, cascade
from gaugelasso.compress.surgery import cut_


def check_cuts(subject: Subject) -> list[Finding]:
    """A finding for each axis, and one for each axis that should silence its operator."""
    model = subject.exact()
    findings = []
    for axis in model.axis_table().axes:
        if width(axis, named_tensors(model)) > 1:
            findings.append(_check_some(subject, model, axis))
    if any(finding.failed for finding in findings):
        return findings  # an operator whose parts cannot be cut cannot vanish either
    table = model.axis_table()
    for axis in table.axes:
        removable = axis.owner is not None and axis.owner not in table.required
        if removable and axis.silences and width(axis, named_tensors(model)):
            findings += _check_silence(subject, model, axis)
    return findings


def _check_some(subject: Subject, model: Compressible, axis: Axis) -> Finding:
    """Zero some indices of one axis, then cut them."""
    decision = some_dropped(model, axis)
    if decision is None:
        return passed("zero", axis.name, "zero indices can be cut")
    keep = decision.keeps[axis.name]
    trial = _zeroed(model, axis, keep)
    before = subject.output(trial)
    after = _cut_(subject, trial, decision, axis.name)
    if isinstance(after, Finding):
        return after
    error = difference(after, before)
    if error <= TOLERANCE:
        return passed("zero", axis.name, "zero indices can be cut")
    message = f"cutting indices that are zero on both sides changes the output by {error:.1g}"
    cause = _cause(subject, _zeroed(model, axis, keep), axis, keep, after)
    return failed("zero", axis.name, f"{message}; {cause}")


def _zeroed(model: Compressible, axis: Axis, keep: Tensor) -> Compressible:
    """A copy of the model without the effect of the indices of an axis that are not kept."""
    zeroed = copy.deepcopy(model)
    silence_(zeroed.axis_table(), named_tensors(zeroed), axis.name, keep)
    return zeroed


def some_dropped(model: Compressible, axis: Axis) -> Decision | None:
    """A decision that drops about a third of an axis, or fewer where a required part would go."""
    table, tensors = model.axis_table(), named_tensors(model)
    size = width(axis, tensors)
    for number in range(max(1, size // 3), 0, -1):
        keeps: Keeps = all_kept(table, tensors)
        keeps[axis.name][torch.arange(number) * size // number] = False
        decision = cascade(table, tensors, keeps)
        if decision is not None and not decision.removed and not decision.keeps[axis.name].all():
            return decision
    return None


def _cut_(subject: Subject, model: Compressible, decision: Decision, name: str) -> Tensor | Finding:
    """Cut a model: its output, or a finding if it cannot be cut or does not run any more."""
    try:
        cut_(model, model.axis_table(), decision.keeps, decision.removed)
        model.axis_table().check(named_tensors(model))
    except Exception as error:
        what = f"after the removal of {', '.join(decision.removed)}" if decision.removed else ""
        return failed("zero", name, f"the table does not fit {what or 'after a cut'}: "
                      f"{reason(error)}; axis_table() and remove_operator() must describe the "
                      "model in its present shape")  # fmt: skip
    try:
        return subject.output(model)
    except Exception as error:
        return failed("zero", name, f"the forward pass fails after a cut: {reason(error)}; read "
                      "every width from a tensor's shape, and put every tensor that has the index "
                      "on the axis")  # fmt: skip


def _cause(subject: Subject, zeroed: Compressible, axis: Axis, keep: Tensor, after: Tensor) -> str:
    tensors = named_tensors(zeroed)
    for slot in axis.riders:
        tensor = tensors[slot.tensor]
        if not tensor.is_floating_point():
            continue
        trial = copy.deepcopy(zeroed)
        scale_(slot, keep.to(tensor), 1, named_tensors(trial))
        if difference(subject.output(trial), after) <= TOLERANCE:
            side = "a side" if isinstance(tensor, nn.Parameter) else "the weights of a Norm"
            return (
                f"rider {describe(slot)} still contributes when both sides are zero: it must be "
                f"on {side} of the axis, or be multiplied by one"
            )
    return (
        "something else depends on the number of indices or on a zero index: a mean or a norm over "
        "the dim (use gaugelasso.models.SlowNorm), a scale that is computed from the width, or a "
        "nonlinearity that is not zero at zero (put the bias inside of it on side A)"
    )


def _check_silence(subject: Subject, model: Compressible, axis: Axis) -> list[Finding]:
    """Zero all of an axis: its owner must write nothing."""
    table, tensors = model.axis_table(), named_tensors(model)
    keeps = all_kept(table, tensors)
    keeps[axis.name].zero_()
    decision = cascade(table, tensors, keeps)
    if decision is None:
        return []
    trial = _zeroed(model, axis, keeps[axis.name])
    before = subject.output(trial)
    after = _cut_(subject, trial, decision, axis.name)
    if isinstance(after, Finding):
        return [after]
    error = difference(after, before)
    if error <= TOLERANCE:
        return []
    return [
        failed(
            "zero",
            axis.name,
            f"{axis.owner!r} still writes when the axis is empty: its removal changes the output "
            f"by {error:.1g}; declare silences=False (usual cause: a bias after the axis)",
        )
    ]
