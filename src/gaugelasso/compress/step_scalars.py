"""The scalars of a step: whether it is finite, its penalty strength, its rates.

All of them stay on the device; only `counts` reads values back. Knows nothing of axes, weights
or their layout.
"""

import torch
from torch import Tensor

from gaugelasso.compress.solver import OPPOSITION, TINY, RhoSolver, smooth_
from gaugelasso.kernels.dispatch import fused_flat

# The scalars that a checkpoint holds.
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
    """The scalars of all steps; they do not depend on the structure.

    `check_finite_` comes first. A step whose loss or gradient is NaN or infinite is not sound: it
    is skipped, with rho and all rates zero. The arithmetic costs little beside its launches, so on
    a GPU `check_finite_` and `solve_rho_` are one sum and one kernel each.
    """

    def __init__(
        self,
        like: Tensor,
        solver: RhoSolver,
        smoothing: float,
        norm_rate: float,
        norms_pause: bool = False,
    ):
        self._solver, self._smoothing, self._norm_rate = solver, smoothing, norm_rate
        # Whether slow norm weights follow at steps with a positive rho alone, or at all steps
        # since the first one.
        self._norms_pause = norms_pause
        # Set by the training loop: the learning rate, the loss that is pressed towards, and the
        # share of rho that is applied.
        self._last_set: dict[str, float] = {}
        self.lr = like.new_zeros(())
        self.loss_target = like.new_full((), solver.loss_target)
        self.pressure = like.new_ones(())
        # The last rho; whether any rho was positive since the last event, and since the start.
        self.rho = like.new_zeros(())
        self.pressed = like.new_zeros(())
        self.begun = like.new_zeros(())
        # The smoothed loss, and the number of losses in it.
        self.smoothed = like.new_zeros(())
        self.seen = like.new_zeros(())
        # Skipped steps: all of them, those in a row up to now, and the longest row since the last
        # `reset_streak_`.
        self.skipped = like.new_zeros(())
        self.failing = like.new_zeros(())
        self.streak = like.new_zeros(())

    def state(self) -> dict[str, Tensor]:
        """All scalars by name, for checkpoints."""
        return {name: getattr(self, name) for name in _SCALARS}

    def set_lr_(self, lr: float) -> None:
        """Set the learning rate."""
        self._set_("lr", lr)

    def set_norm_rate_(self, rate: float) -> None:
        """Set the share that slow norm weights follow in a step. A CUDA graph keeps the old one."""
        self._norm_rate = rate

    def set_loss_target_(self, loss: float) -> None:
        """Set the loss that is pressed towards. A checkpoint does not hold it."""
        self._set_("loss_target", loss)

    def set_pressure_(self, share: float) -> None:
        """Set the share of rho that is applied. With 0 no event is due any more."""
        if self._set_("pressure", share) and not share:
            self.pressed.zero_()

    def _set_(self, name: str, value: float) -> bool:
        """Fill a scalar; False if it was set to this value last, which saves a launch."""
        if self._last_set.get(name) == value:
            return False
        self._last_set[name] = value
        getattr(self, name).fill_(value)
        return True

    def forget_last_set_(self) -> None:
        """The scalars were written by a load: the next setter must fill again."""
        self._last_set.clear()

    def check_finite_(self, loss: Tensor, gradient: Tensor) -> Tensor:
        """Whether loss and gradient are finite. Smooths the loss, or counts a skipped step."""
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
        # The gradient's square, so that a second moment cannot overflow either.
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
        """Set rho and the flags; `gradient` is that of the penalty.

        Returns the rate of this step's weights and the rate of its slow norm weights.
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
                loss_target=self.loss_target,
                fixed=solver.rho,
                opposition=OPPOSITION,
                tiny=TINY,
                norm_rate=self._norm_rate,
                norms_pause=self._norms_pause,
            )
        rho = solver.solve(self.smoothed, self.lr, momentum, gradient, self.loss_target)
        self.rho.copy_(rho * self.pressure * sound)
        pressing = (self.rho > 0).to(self.rho)
        for flag in (self.pressed, self.begun):
            torch.maximum(flag, pressing, out=flag)
        # No event after a skipped step: the energies of its inputs may be NaN.
        self.pressed.mul_(sound)
        following = pressing if self._norms_pause else self.begun
        return self.lr * sound, self._norm_rate * following * sound

    # --- skipped steps, for the trainer ---------------------------------------------

    def counts(self) -> tuple[int, int, int]:
        """Skipped steps: all, in a row up to now, longest row since the last `reset_streak_`."""
        skipped, failing, streak = torch.stack([self.skipped, self.failing, self.streak]).tolist()
        return int(skipped), int(failing), int(streak)

    def reset_streak_(self) -> None:
        """Start to count the longest row of skipped steps again, from the present one."""
        self.streak.copy_(self.failing)

    def recount_(self, skipped: int) -> None:
        """Set the number of skipped steps after a rollback; none of them is in a row."""
        self.skipped.fill_(skipped)
        self.failing.zero_()
        self.streak.zero_()
