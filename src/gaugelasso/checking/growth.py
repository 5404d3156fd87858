"""Growth: where the table says how an axis may grow, new indices change no output."""

import copy

import torch

from gaugelasso.axes import Axis, Compressible, named_tensors
from gaugelasso.checking.result import Finding, failed
from gaugelasso.checking.subject import TOLERANCE, Subject, difference, reason
from gaugelasso.compress import growth
from gaugelasso.compress.surgery import swap_


def check_growth(subject: Subject) -> list[Finding]:
    """A finding for each axis that does not grow as its table says. Only failures are listed."""
    model = subject.exact()
    findings = []
    for axis in model.axis_table().axes:
        if finding := _check(subject, model, axis):
            findings.append(finding)
    return findings


def _check(subject: Subject, model: Compressible, axis: Axis) -> Finding | None:
    larger = copy.deepcopy(model)
    table, tensors = larger.axis_table(), named_tensors(larger)
    if not growth.room(table, axis, tensors):
        return None
    generator = torch.Generator().manual_seed(2)
    try:
        swap_(larger, growth.grow(tensors, table, {axis.name: 1}, generator).tensors)
        larger.axis_table().check(named_tensors(larger))
        after = subject.output(larger)
    except Exception as error:
        return failed("growth", axis.name, f"growth={axis.growth!r}: the model fails with one more "
                      f"index: {reason(error)}; read every width from a tensor's shape, or leave "
                      "out growth")  # fmt: skip
    change = difference(after, subject.output(model))
    if change <= TOLERANCE:
        return None
    remedy = "'permutation'" if axis.growth == "linear" else "None, so that the axis never grows"
    return failed("growth", axis.name, f"one more index changes the output by {change:.1g}: "
                  f"the axis is not {axis.growth}; declare growth={remedy}")  # fmt: skip
