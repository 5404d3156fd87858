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
        harm = self._state.harm
        # By harm only the sign of rho counts, for which any pull towards zero will do.
        gradient = weight if harm is not None else self._penalty_gradient(norms)
        lr, norm_rate = scalars.solve_rho_(optimizer.momentum, gradient, sound)
        rates = None
        if self._relative_step:
            start = optimizer.matrix_end
            rates = plan.penalty.bounded_rate(norms, lr, self._relative_step, start)
        if harm is not None:
            harm.observe_(plan.penalty, weight, plan.store.grad, sound)
            # Not the weights, which change while they would be read.
            optimizer.step_(optimizer.momentum, self._nothing, lr, rates)
            return loss
        if self._decoupled:
            optimizer.step_(gradient, self._nothing, lr, rates)
            weight.sub_(lr * scalars.rho * gradient)
        else:
            optimizer.step_(gradient, scalars.rho, lr, rates)
        plan.slow.follow_(norm_rate)
        return loss

    def _penalty_gradient(self, norms: Tensor) -> Tensor:
        plan = self._state.plan
        gradient = plan.penalty.gradient(plan.store.weight, norms)
        plan.penalty.hold_unseen_(gradient, plan.store.grad)
        return gradient
