"""Declared work against counted work: the matrix products of a forward pass, per token.

The declared side is the terms `matmul`, `scores` and `mix`; elementwise work is not counted. A
causal model may compute the scores of all keys and declare the visible ones: both are accepted.
An attention that pads keys and values to one width saves no scores by the cut of one index: the
figures of an axis may leave them out, the figure of the whole model may not.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator

import torch
from torch.utils.flop_counter import FlopCounterMode

from gaugelasso.axes import AxisTable, Compressible, Cost, named_tensors, width
from gaugelasso.checking.result import Finding, failed, passed
from gaugelasso.checking.subject import Subject, all_kept, reason
from gaugelasso.compress.drop import cascade
from gaugelasso.compress.surgery import cut_

# Of the larger of both figures.
TOLERANCE = 0.01


def check_costs(subject: Subject) -> list[Finding]:
    """A finding for the whole work, and one for each axis."""
    model = subject.exact()
    tokens = _tokens(subject, model)
    try:
        whole = _counted(subject, model) / tokens
    except Exception as error:
        return [failed("cost", "counting", f"the work cannot be counted: {reason(error)}")]
    table = model.axis_table()
    findings = [
        finding
        for axis in table.axes
        if width(axis, named_tensors(model)) > 1
        for finding in _check_axis(subject, model, axis.name, whole, tokens)
    ]
    declared = _declared(table, table.widths(named_tensors(model)))
    if not any(_close(whole, each) for each in declared[:2]):
        advice = "the costs of the axes above"
        if not any(finding.failed for finding in findings):
            advice = f"add the constant part, Cost('matmul', {round(whole - declared[0])}, ())"
            if whole < declared[0]:
                advice = "a constant term is too large, or the sequences of the batch are not of "
                advice += f"the length that context declares ({table.context[0]})"
        message = (
            f"{whole:,.0f} FMA per token are counted in matrix products, the table declares "
            f"{declared[0]:,.0f}; {advice}"
        )
        findings.append(failed("cost", "total", message))
    return findings


def _check_axis(
    subject: Subject, model: Compressible, name: str, whole: float, tokens: int
) -> list[Finding]:
    """Compare what a cut of one index saves."""
    table, tensors = model.axis_table(), named_tensors(model)
    keeps = all_kept(table, tensors)
    keeps[name][-1] = False
    decision = cascade(table, tensors, keeps)
    if decision is None or decision.removed:
        return []
    # A cut replaces tensors and writes into none, so the copy shares them.
    smaller = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors.values()})
    try:
        cut_(smaller, table, decision.keeps)
        saved = whole - _counted(subject, smaller) / tokens
    except Exception:  # a finding of `check_cuts` already
        return []
    before = _declared(table, table.widths(tensors))
    after = _declared(table, {axis: int(keep.sum()) for axis, keep in decision.keeps.items()})
    declared = [b - a for b, a in zip(before, after, strict=True)]
    if any(_close(saved, each) for each in declared):
        return [passed("cost", name, f"declared and counted work agree to {TOLERANCE:.0%}")]
    terms = [cost for cost in table.costs if name in cost.axes]
    named = ", ".join(f"Cost({c.kind!r}, {c.factor}, {c.axes})" for c in terms)
    return [
        failed(
            "cost",
            name,
            f"one index saves {saved:,.6g} FMA per token by count, and {declared[0]:,.6g} by the "
            f"table ({named or 'no cost names the axis'})",
        )
    ]


def _declared(table: AxisTable, widths: dict[str, int]) -> tuple[float, float, float]:
    """The work in matrix products by the table: with visible keys, with all keys, with none."""

    def total(keys: Callable[[Cost], float]) -> float:
        return sum(
            cost.factor * _weight(cost, keys(cost)) * math.prod(widths[name] for name in cost.axes)
            for cost in table.costs
        )

    context = table.context
    every = float(context[0])
    return total(lambda cost: cost.visible_keys(*context)), total(lambda _: every), total(_none)


def _none(cost: Cost) -> float:
    return 0.0


def _weight(cost: Cost, keys: float) -> float:
    if cost.kind == "matmul":
        return 1.0
    return keys * cost.unit if cost.kind in ("scores", "mix") else 0.0


def _counted(subject: Subject, model: Compressible) -> float:
    """The multiply-adds of all matrix products of one forward pass."""
    # The math form: a fused attention is not counted on every device, nor are the fused layers that
    # torch.nn.TransformerEncoderLayer and MultiheadAttention have for evaluation.
    with (
        _unfused_layers(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        subject.output(model)
    return counter.get_total_flops() / 2


@contextlib.contextmanager
def _unfused_layers() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _tokens(subject: Subject, model: Compressible) -> int:
    """The sequences of the batch times the length that the table declares."""
    inputs = subject.inputs[0] if isinstance(subject.inputs, tuple) else subject.inputs
    return len(inputs) * model.axis_table().context[0]


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other)) + 1e-9
