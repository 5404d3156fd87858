"""Penalty strength from a loss target. Scalars only; reads nothing back to the host.

rho is chosen so that the penalty's share of a step uses up the margin to the target. It is zero
without a margin, or without a penalty that opposes descent.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Method = Literal["conservative", "sign_step", "fixed"]

# Descent counts as opposing the penalty by at least this share of the penalty's 1-norm. Half of
# that norm comes from a few dozen gains and scales, whose momenta have noisy signs. Where the loss
# is nearly flat, the sum can stay at or below zero for the rest of a run, and rho would stay zero
# although there is margin.
OPPOSITION = 0.02
# The smallest denominator.
TINY = 1e-30


@dataclass(frozen=True)
class RhoSolver:
    """How rho is computed.

    - conservative: (L* - L) / (-lr <sign m, r>): uses only the margin that exists
    - sign_step:    the same with lr ||m||_1 added to the margin: uses the predicted descent too
    - fixed:        the given rho, for any loss
    """

    method: Method
    loss_target: float
    rho: float = 0.0

    def solve(
        self,
        loss: Tensor,
        lr: Tensor,
        momentum: Tensor,
        gradient: Tensor,
        loss_target: Tensor | None = None,
    ) -> Tensor:
        """rho for this step, a 0-dim tensor on the momentum's device.

        `loss_target` replaces the one that the solver was created with.
        """
        if self.method == "fixed":
            return torch.full_like(lr, self.rho)
        opposition = -torch.dot(momentum.sign(), gradient)
        target = self.loss_target if loss_target is None else loss_target
        margin = target - loss
        if self.method == "sign_step":
            margin = margin + lr * momentum.abs().sum()
        opposition = torch.maximum(opposition, OPPOSITION * gradient.abs().sum())
        pressing = (margin > 0) & (opposition > 0)
        return torch.where(pressing, margin / (lr * opposition).clamp(min=TINY), 0.0)


def smooth_(average: Tensor, seen: Tensor, loss: Tensor, beta: float, sound: Tensor) -> None:
    """Exponential average of the loss, from its first value on; updates both states in place.

    A loss that is not `sound` changes neither.
    """
    if beta:
        loss = torch.where(seen > 0, torch.lerp(loss, average, beta), loss)
    average.copy_(torch.where(sound, loss, average))
    seen.add_(sound)
