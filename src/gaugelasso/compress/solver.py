"""Penalty strength from a loss target: scalars only, and no host reads.

rho spends the margin to the target on the penalty that the step would otherwise add; it
is zero unless there is margin and a penalty to spend it on.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Method = Literal["conservative", "sign_step", "fixed"]

# Descent counts as opposing the penalty by at least this share of the penalty's 1-norm.
# Half of that norm lies on a few dozen gains and scales, whose momenta have noisy signs:
# where the loss is nearly flat the sum can stay at or below zero for good, and with it
# rho, although there is margin to spend.
OPPOSITION = 0.02
# The least denominator.
TINY = 1e-30


@dataclass(frozen=True)
class RhoSolver:
    """How rho is found.

    - conservative: (L* - L) / (-lr <sign m, r>): spend only margin already earned
    - sign_step:    the same with lr ||m||_1 added: spend predicted gains too
    - fixed:        the given rho, target or not
    """

    method: Method
    loss_target: float
    rho: float = 0.0

    def solve(self, loss: Tensor, lr: Tensor, momentum: Tensor, gradient: Tensor) -> Tensor:
        """rho for this step, a 0-dim tensor on the momentum's device."""
        if self.method == "fixed":
            return torch.full_like(lr, self.rho)
        opposition = -torch.dot(momentum.sign(), gradient)
        margin = self.loss_target - loss
        if self.method == "sign_step":
            margin = margin + lr * momentum.abs().sum()
        opposition = torch.maximum(opposition, OPPOSITION * gradient.abs().sum())
        pressing = (margin > 0) & (opposition > 0)
        return torch.where(pressing, margin / (lr * opposition).clamp(min=TINY), 0.0)


def smooth_(average: Tensor, seen: Tensor, loss: Tensor, beta: float, sound: Tensor) -> None:
    """Exponential average of the loss that starts at its first value; both states in place.

    A loss that is not `sound` leaves both as they are.
    """
    if beta:
        loss = torch.where(seen > 0, torch.lerp(loss, average, beta), loss)
    average.copy_(torch.where(sound, loss, average))
    seen.add_(sound)
