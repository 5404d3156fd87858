"""The check of a model of your own: does its axis table say what the model does?

    result = gaugelasso.check(model, (inputs, targets), loss)
    assert result.passed, str(result)

Works on copies, in float64 and eval mode. The model that is given does not change.
"""

from collections.abc import Callable
from typing import Any

import torch

from gaugelasso.axes import Compressible
from gaugelasso.checking.cost import check_costs
from gaugelasso.checking.cut import check_cuts
from gaugelasso.checking.gauge import check_gauge
from gaugelasso.checking.growth import check_growth
from gaugelasso.checking.rebuild import check_rebuild
from gaugelasso.checking.result import CheckResult, Finding
from gaugelasso.checking.subject import Subject, default_loss
from gaugelasso.checking.table import check_table
from gaugelasso.checking.training import check_training

__all__ = ["CheckResult", "Finding", "check"]

# Steps of the pressed training. At its rate a weight of usual size is zero after a tenth of them.
STEPS = 300


def check(
    model: Compressible,
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    *,
    steps: int = STEPS,
) -> CheckResult:
    """Check a model's axis table against what the model computes.

    `batch` is (inputs, targets): the model is called as model(inputs), or model(*inputs) for a
    tuple, and the loss as loss(outputs, targets). Without a loss it is the cross-entropy for
    integer targets, else the mean square. The sequences of the batch have the length that the
    table's `context` declares.

    - table: every dim of every tensor is declared; the forward pass runs and repeats itself
    - gauge: side A times c and side B divided by c change no output, for each axis
    - zero: indices that are zero on both sides can be cut, and an axis whose loss silences its
      operator does so
    - growth: new indices change no output, where the table says how an axis may grow
    - rebuild: a cut model that is built again from its structure has the same outputs
    - cost: the declared work of matrix products is the counted one, in total and for each axis
    - training: `steps` steps of pressed training, until nothing removable is left

    Each failure is a `Finding` that names the axis, the slot and what to change.
    """
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        subject = Subject(model, batch, loss or default_loss)
        findings = check_table(subject)
        if not any(finding.failed for finding in findings):
            for part in (check_gauge, check_cuts, check_growth, check_rebuild, check_costs):
                with torch.no_grad():
                    findings += part(subject)
            findings += check_training(subject, steps)
    return CheckResult(tuple(findings))
