"""The device's part of a step: momentum, penalty, rho, update; or the harm that is measured.

Reads nothing back to the host, so that a CUDA graph can capture it.
"""

import torch
from torch import Tensor

from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.penalty import Coupling
from gaugelasso.compress.step_scalars import StepScalars


class DeviceStep:
    """The order of one step on a model's state.

    `relative_step` bounds how much a step changes a lasso group on the elementwise path, as a
    share of the group's RMS; 0 is no bound.

    A coupled penalty is part of the optimizer's step. A decoupled one is a gradient step of its
    own after it, w -= lr rho r, which the optimizer does not normalise: for comparison only.

    Where channels go by their harm, rho only says whether the loss has margin, and no penalty is
    applied. Slow norm weights stay, because no gain is pressed towards zero.
    """

    def __init__(
        self,
        state: ModelState,
        scalars: StepScalars,
        relative_step: float,
        coupling: Coupling = "coupled",
    ):
        self._state, self._scalars, self._relative_step = state, scalars, relative_step
        self._decoupled = coupling == "decoupled"
        self._nothing = torch.zeros_like(scalars.rho)
        # A penalty in place of that of all weights, where only the sign of rho counts.
        self._unit = torch.ones_like(scalars.rho).reshape(1)

    @torch.no_grad()
    def add_microbatch_(self, micro: int, loss: Tensor) -> None:
        """Take in one of several micro-batches, after its backward pass."""
        self._state.plan.means.add_microbatch_(micro, loss)

    @torch.no_grad()
    def update_(self, loss: Tensor) -> Tensor:
        """Update the weights from the gradients; returns the loss, averaged over all ranks.

        A step whose loss or gradient is NaN or infinite changes nothing and counts as skipped.
        """
        plan, scalars, optimizer = self._state.plan, self._scalars, self._state.optimizer
        weight = plan.store.weight
        loss = plan.means.finish_(loss)
        sound = scalars.check_finite_(loss, plan.store.grad)
        optimizer.observe_(sound)
        norms = plan.penalty.norms(weight)
        if (harm := self._state.harm) is not None:
            lr, _ = scalars.solve_rho_(self._unit, self._unit, sound)
            harm.observe_(plan.penalty, weight, plan.store.grad, sound)
            # Times zero: any vector of this length will do as the penalty's gradient.
            optimizer.step_(optimizer.momentum, self._nothing, lr, self._rates(norms, lr))
            return loss
        gradient = plan.penalty.gradient(weight, norms)
        plan.penalty.hold_unseen_(gradient, plan.store.grad)
        lr, norm_rate = scalars.solve_rho_(optimizer.momentum, gradient, sound)
        rates = self._rates(norms, lr)
        if self._decoupled:
            optimizer.step_(gradient, self._nothing, lr, rates)
            weight.sub_(lr * scalars.rho * gradient)
        else:
            optimizer.step_(gradient, scalars.rho, lr, rates)
        plan.slow.follow_(norm_rate)
        return loss

    def _rates(self, norms: Tensor, lr: Tensor) -> Tensor | None:
        """Rates of the elements that are stepped one by one; None for lr."""
        if not self._relative_step:
            return None
        start = self._state.optimizer.matrix_end
        return self._state.plan.penalty.bounded_rate(norms, lr, self._relative_step, start)
