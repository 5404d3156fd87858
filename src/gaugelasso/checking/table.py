"""The declaration itself: methods, coverage, and a forward pass that repeats itself."""

import json

import torch

from gaugelasso.axes import AxisError, named_tensors
from gaugelasso.checking.result import Finding, failed, noted, passed
from gaugelasso.checking.subject import Subject, call, describe, flat, reason
from gaugelasso.compress.checks import check_model
from gaugelasso.compress.flat import tied_names
from gaugelasso.compress.pricing import ACCOUNTINGS, prices
from gaugelasso.errors import UserError


def check_table(subject: Subject) -> list[Finding]:
    """Findings on the table; nothing else is checked if one of them is a failure."""
    model = subject.model
    try:
        check_model(model)
        table = model.axis_table()
        table.check(named_tensors(model))
    except (UserError, TypeError) as error:
        return [failed("table", type(model).__name__, f"{error}{_tied_hint(subject, error)}")]
    try:
        json.dumps(model.structure())
    except Exception as error:
        message = f"structure() must return what JSON can hold: {reason(error)}"
        return [failed("table", "structure", message)]
    findings = _check_forward(subject)
    tensors = named_tensors(model)
    findings += [
        noted(
            "table", axis.name, "no cost names this axis, so that its price is 0 and nothing "
            f"presses it; add it to a Cost, or declare {describe(axis.slots()[0])} fixed"
        )
        for axis in table.axes
        if not (prices(table, ACCOUNTINGS["fma"], tensors)[axis.name] > 0).any()
    ]  # fmt: skip
    if not any(finding.failed for finding in findings):
        number = f"{len(table.axes)} axes, {len(tensors)} tensors"
        findings.insert(0, passed("table", number, "every dim is on an axis or fixed"))
    return findings


def _check_forward(subject: Subject) -> list[Finding]:
    try:
        model = subject.exact()
        with torch.no_grad():
            first, second = (call(model, subject.inputs, torch.float64) for _ in range(2))
            first, second = flat(first), flat(second)
    except Exception as error:
        message = f"the forward pass fails on the batch in float64: {reason(error)}"
        return [failed("table", "forward", message)]
    if first.dtype is not torch.float64:
        message = (
            f"the outputs of a float64 model are {first.dtype}: the forward pass converts, so "
            "nothing can be compared exactly; use the dtype of the parameters"
        )
        return [failed("table", "forward", message)]
    if not bool(first.isfinite().all()):
        return [failed("table", "forward", "the outputs are NaN or infinite on the batch")]
    if not torch.equal(first, second):
        message = "two calls in eval mode differ: remove what is random or keeps state"
        return [failed("table", "forward", message)]
    return []


def _tied_hint(subject: Subject, error: Exception) -> str:
    """The first name of a tied tensor, where the table uses another one."""
    if not isinstance(error, AxisError):
        return ""
    for first, others in tied_names(subject.model).items():
        for other in others:
            if repr(other) in str(error):
                return f"; it is tied to {first!r}, so use that name"
    return ""
