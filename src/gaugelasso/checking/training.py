"""A short pressed training, until nothing removable is left: no NaN, no error on the way."""

import copy
import json

import torch

from gaugelasso.checking.result import Finding, failed, passed
from gaugelasso.checking.subject import Subject, call, reason
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.options import CompressorOptions

# A constant, strong pressure and a high rate: every index that has a price is gone soon.
_OPTIONS = CompressorOptions(lr=0.03, interval=5, solver="fixed", rho=1.0, drop_tolerance=1e9)
# So many events in a row that change nothing are the end.
_PATIENCE = 8


def check_training(subject: Subject, steps: int) -> list[Finding]:
    """Train a copy of the model in its own dtype."""
    model = copy.deepcopy(subject.model).train()
    step, began, unchanged, when = 0, False, 0, "at the start"
    try:
        compressor = Compressor(model, loss_target=0.0, options=_OPTIONS)
        for step in range(1, steps + 1):
            when = f"in step {step}, at the widths {compressor.widths}"
            outputs = call(model, subject.inputs, next(model.parameters()).dtype)
            loss = subject.loss(outputs, subject.targets)
            loss.backward()
            event = compressor.step(loss)
            if not compressor.resume_state.finite() or int(compressor.skipped):
                message = f"a loss, gradient or weight is NaN or infinite {when}"
                return [failed("training", "values", message)]
            if event is not None:
                began = began or bool(event.dropped)
                unchanged = unchanged + 1 if began and not event.dropped else 0
            if unchanged >= _PATIENCE:
                break
        with torch.no_grad():
            call(model.eval(), subject.inputs, next(model.parameters()).dtype)
        json.dumps(model.structure())
    except Exception as error:
        return [failed("training", type(model).__name__, f"fails {when}: {reason(error)}")]
    widths = compressor.widths
    if not any(event.dropped for event in compressor.history):
        message = f"nothing was removed in {step} steps of strong pressure; are costs missing?"
        return [failed("training", type(model).__name__, message)]
    figures = f"{compressor.fma_initial:,.0f} -> {compressor.fma:,.0f} FMA per token"
    indices = f"{sum(widths.values())} indices left"
    message = f"{figures} in {step} steps of strong pressure, {indices}, all values finite"
    return [passed("training", type(model).__name__, message)]
