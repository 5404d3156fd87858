"""A network that a mistake is made in, and what the check says of it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gaugelasso
from gaugelasso import Axis, AxisTable, CheckResult, Compressible, Cost, Slot

BATCH = torch.linspace(-1, 1, 48).view(8, 6), torch.linspace(-1, 2, 24).view(8, 3)


class Net(Compressible):
    """down(f(up x + bias)) for an activation f; subclasses make one mistake each."""

    activation = staticmethod(F.relu)
    axis = Axis(
        "hidden", "hidden", (Slot("up", 1),), (Slot("down"),), (Slot("bias", power=1),), owner="net"
    )
    costs: tuple[Cost, ...] = (Cost("matmul", 9, ("hidden",)),)
    fixed: tuple[Slot, ...] = (Slot("up", 0), Slot("down", 1))
    required = frozenset({"net"})

    def __init__(self, hidden: int = 8):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(6, hidden) * 0.4)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.down = nn.Parameter(torch.randn(hidden, 3) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x @ self.up + self.bias) @ self.down

    def axis_table(self) -> AxisTable:
        matrices = {"up": 1, "down": 1}
        return AxisTable(
            (self.axis,), self.fixed, matrices, costs=self.costs, required=self.required
        )

    def structure(self) -> dict:
        return {"hidden": self.up.shape[1]}


def report(model: Compressible, batch: Any = BATCH) -> CheckResult:
    return gaugelasso.check(model, batch, steps=150)


def only_failure(model: Compressible, check: str) -> str:
    """The message of the one failure, which must be of this part of the check."""
    result = report(model)
    assert not result
    assert [finding.check for finding in result.failures] == [check], str(result)
    return f"{result.failures[0].subject}: {result.failures[0].message}"
