"""Penalty strength from a loss target, and the other scalars that a step goes by; no host reads.

rho spends the margin to the target on the penalty that the step would otherwise add; it
is zero unless there is margin and a penalty to spend it on.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gaugelasso.kernels.dispatch import fused_flat

Method = Literal["conservative", "sign_step", "fixed"]

# Descent counts as opposing the penalty by at least this share of the penalty's 1-norm.
# Half of that norm lies on a few dozen gains and scales, whose momenta have noisy signs:
# where the loss is nearly flat the sum can stay at or below zero for good, and with it
# rho, although there is margin to spend.
_OPPOSITION = 0.02
_TINY = 1e-30

# What a checkpoint keeps of a `Pace`.
_SCALARS = (
    "lr",
    "pressure",
    "begun",
    "rho",
    "pressed",
    "smoothed",
    "seen",
    "skipped",
    "failing",
    "streak",
)


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
        opposition = torch.maximum(opposition, _OPPOSITION * gradient.abs().sum())
        pressing = (margin > 0) & (opposition > 0)
        return torch.where(pressing, margin / (lr * opposition).clamp(min=_TINY), 0.0)


def smooth_(average: Tensor, seen: Tensor, loss: Tensor, beta: float, sound: Tensor) -> Tensor:
    """Exponential average of the loss that starts at its first value; both states in place.

    A loss that is not `sound` leaves both as they are.
    """
    if beta:
        loss = torch.where(seen > 0, torch.lerp(loss, average, beta), loss)
    average.copy_(torch.where(sound, loss, average))
    seen.add_(sound)
    return average


class Pace:
    """How hard steps press and how far they go: scalars on the device, whatever the structure.

    A step is judged first. One that is not sound, as its loss or its gradient is not a number,
    moves nothing: rho and rates are zero. The arithmetic is next to nothing and its launches
    would be thirty: on a GPU `judge_` and `press_` are one sum and one kernel each.
    """

    def __init__(self, like: Tensor, solver: RhoSolver, smoothing: float, norm_rate: float):
        self._solver, self._smoothing, self._norm_rate = solver, smoothing, norm_rate
        # Set from outside: the learning rate, and the share of rho that is pressed with.
        self.lr = like.new_zeros(())
        self.pressure = like.new_ones(())
        # The last rho; whether any was positive, since the last event and at all.
        self.rho = like.new_zeros(())
        self.pressed = like.new_zeros(())
        self.begun = like.new_zeros(())
        # The average loss, and the number of losses in it.
        self.smoothed = like.new_zeros(())
        self.seen = like.new_zeros(())
        # Steps that were not taken because loss or gradient was not a number: all, those in a
        # row up to now, and the most in a row since somebody looked.
        self.skipped = like.new_zeros(())
        self.failing = like.new_zeros(())
        self.streak = like.new_zeros(())

    def state(self) -> dict[str, Tensor]:
        """All scalars by name, for checkpoints."""
        return {name: getattr(self, name) for name in _SCALARS}

    def judge_(self, loss: Tensor, gradient: Tensor) -> Tensor:
        """Whether the step is sound; if so its loss joins the average, if not it is counted."""
        if fused_flat(gradient):
            from gaugelasso.kernels.gpu.solver import judge_

            state = self.skipped, self.failing, self.streak, self.smoothed, self.seen
            return judge_(loss, gradient, state, self._smoothing)
        # The square: a second moment must not overflow either.
        sound = loss.isfinite() & gradient.dot(gradient).isfinite()
        unsound = ~sound
        self.skipped.add_(unsound)
        self.failing.add_(1).mul_(unsound)
        torch.maximum(self.streak, self.failing, out=self.streak)
        smooth_(self.smoothed, self.seen, loss, self._smoothing, sound)
        return sound

    def press_(self, momentum: Tensor, gradient: Tensor, sound: Tensor) -> tuple[Tensor, Tensor]:
        """Set rho and the flags; `gradient` is the penalty's.

        Returns the rates of this step and of its slow weights.
        """
        solver = self._solver
        if fused_flat(momentum):
            from gaugelasso.kernels.gpu.solver import press_

            state = (
                self.smoothed, self.lr, self.pressure, self.rho, self.pressed, self.begun,
            )  # fmt: skip
            numbers = solver.loss_target, solver.rho, _OPPOSITION, _TINY, self._norm_rate
            return press_(momentum, gradient, sound, state, solver.method, numbers)
        rho = solver.solve(self.smoothed, self.lr, momentum, gradient)
        self.rho.copy_(rho * self.pressure * sound)
        pressing = (self.rho > 0).to(self.rho)
        for flag in (self.pressed, self.begun):
            torch.maximum(flag, pressing, out=flag)
        # No event after a skipped step: energies of its inputs are not to be trusted.
        self.pressed.mul_(sound)
        return self.lr * sound, self._norm_rate * self.begun * sound
