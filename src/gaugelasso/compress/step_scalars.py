"""The scalars that a step goes by: whether it is sound, how hard it presses, how far it goes.

They stay on the device but for `counts`. Knows nothing of axes, weights or their layout.
"""

import torch
from torch import Tensor

from gaugelasso.compress.solver import OPPOSITION, TINY, RhoSolver, smooth_
from gaugelasso.kernels.dispatch import fused_flat

# What a checkpoint keeps.
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


class StepScalars:
    """How hard steps press and how far they go: the same scalars whatever the structure.

    A step is judged first. One that is not sound, as its loss or its gradient is not a number,
    moves nothing: rho and rates are zero. The arithmetic is next to nothing beside its launches:
    on a GPU `check_finite_` and `solve_rho_` are one sum and one kernel each.
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

    def check_finite_(self, loss: Tensor, gradient: Tensor) -> Tensor:
        """Whether the step is sound; if so its loss joins the average, if not it is counted."""
        if fused_flat(gradient):
            from gaugelasso.kernels.gpu.step_scalars import check_finite_

            return check_finite_(
                loss,
                gradient,
                self._smoothing,
                smoothed=self.smoothed,
                seen=self.seen,
                skipped=self.skipped,
                failing=self.failing,
                streak=self.streak,
            )
        # The square: a second moment must not overflow either.
        sound = loss.isfinite() & gradient.dot(gradient).isfinite()
        unsound = ~sound
        self.skipped.add_(unsound)
        self.failing.add_(1).mul_(unsound)
        torch.maximum(self.streak, self.failing, out=self.streak)
        smooth_(self.smoothed, self.seen, loss, self._smoothing, sound)
        return sound

    def solve_rho_(
        self, momentum: Tensor, gradient: Tensor, sound: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Set rho and the flags; `gradient` is the penalty's.

        Returns the rates of this step and of its slow weights.
        """
        solver = self._solver
        if fused_flat(momentum):
            from gaugelasso.kernels.gpu.step_scalars import solve_rho_

            return solve_rho_(
                momentum,
                gradient,
                sound,
                smoothed=self.smoothed,
                lr=self.lr,
                pressure=self.pressure,
                rho=self.rho,
                pressed=self.pressed,
                begun=self.begun,
                method=solver.method,
                loss_target=solver.loss_target,
                fixed=solver.rho,
                opposition=OPPOSITION,
                tiny=TINY,
                norm_rate=self._norm_rate,
            )
        rho = solver.solve(self.smoothed, self.lr, momentum, gradient)
        self.rho.copy_(rho * self.pressure * sound)
        pressing = (self.rho > 0).to(self.rho)
        for flag in (self.pressed, self.begun):
            torch.maximum(flag, pressing, out=flag)
        # No event after a skipped step: energies of its inputs are not to be trusted.
        self.pressed.mul_(sound)
        return self.lr * sound, self._norm_rate * self.begun * sound

    # --- skipped steps, for the trainer ---------------------------------------------

    def counts(self) -> tuple[int, int, int]:
        """Steps skipped: all, in a row up to now, most in a row since the last `reset_streak_`."""
        skipped, failing, streak = torch.stack([self.skipped, self.failing, self.streak]).tolist()
        return int(skipped), int(failing), int(streak)

    def reset_streak_(self) -> None:
        """The longest row was looked at: from here on only the present one counts."""
        self.streak.copy_(self.failing)

    def recount_(self, skipped: int) -> None:
        """Go on from another state, after so many skipped steps, of which none in a row."""
        self.skipped.fill_(skipped)
        self.failing.zero_()
        self.streak.zero_()
