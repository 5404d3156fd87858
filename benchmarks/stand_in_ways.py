"""Ways to press on a pretrained model that were tried beside those of the package, and lost.

They are methods of `benchmarks.stand_in`, which describes them.
"""

import math

import numpy as np
import torch
from torch import Tensor

from gaugelasso.axes import Tensors, named_tensors
from gaugelasso.compress import reference
from gaugelasso.compress.compressor import Compressor
from gaugelasso.compress.courses.work import REACHED, WorkCourse
from gaugelasso.compress.device_step import DeviceStep
from gaugelasso.compress.drop import Decision
from gaugelasso.models import Transformer

# The strength of `proximal` and `gates` changes by at most this factor in a step, where the work
# is this much off its schedule, on a logarithmic scale.
STRENGTH_RATE, OFF = 0.01, 0.2
# The first strength of `proximal`: a group of a typical price loses this share of the rate a step.
GENTLE = 0.05
# The strength of `gates` is at first that of a model in which all work is worth this share of the
# loss; their rate is such that a gate nothing opposes is closed at the end of the descent.
WORTH = 0.2


def course_of(compressor: Compressor) -> WorkCourse:
    assert compressor.pilot is not None
    course = compressor.pilot.course
    assert isinstance(course, WorkCourse)
    return course


class OwnStrength(DeviceStep):
    """A step without a penalty, and then `shrink_`, with a strength that follows the work."""

    def __init__(self, compressor: Compressor):
        options = compressor.options
        super().__init__(compressor.state, compressor.scalars, options.relative_step)
        self._compressor = compressor
        self.strength: float | None = None
        self.typical: float | None = None  # price

    @property
    def course(self) -> WorkCourse:
        return course_of(self._compressor)

    @torch.no_grad()
    def update_(self, loss: Tensor) -> Tensor:
        plan, scalars, optimizer = self._state.plan, self._scalars, self._state.optimizer
        loss = plan.means.finish_(loss)
        sound = scalars.check_finite_(loss, plan.store.grad)
        optimizer.observe_(sound)
        # The solver is fixed at 1, so rho is 1 at steps with pressure, and 0 at others.
        lr, norm_rate = scalars.solve_rho_(self._unit, self._unit, sound)
        rates = self._rates(plan.penalty.norms(plan.store.weight), lr)
        optimizer.step_(optimizer.momentum, self._nothing, lr, rates)
        if bool(scalars.rho):
            if self.strength is None:
                self.strength = self.first_strength()
            off = min(max(self.course.behind / OFF, -1.0), 1.0)
            self.strength *= math.exp(STRENGTH_RATE * off)
            self.shrink_(float(lr), self.strength)
        plan.slow.follow_(norm_rate)
        return loss

    def first_strength(self) -> float:
        raise NotImplementedError

    def shrink_(self, lr: float, strength: float) -> None:
        raise NotImplementedError


class Proximal(OwnStrength):
    """RMS(T) <- max(0, RMS(T) - lr rho r / (a typical r)) of every group.

    By the penalty's own weights, r / sqrt(n) of the norm, sides of one element would be gone long
    before those of many.
    """

    def first_strength(self) -> float:
        return GENTLE

    def shrink_(self, lr: float, strength: float) -> None:
        plan = self._state.plan
        penalty, weight = plan.penalty, plan.store.weight
        if self.typical is None:
            self.typical = float(np.median(np.concatenate([*plan.prices.values()])))
        price = penalty.strength * penalty.root_count / self.typical
        rms = penalty.norms(weight) / penalty.root_count
        weight.mul_(penalty.elements.combined(_share(rms - lr * strength * price, rms), "product"))


class Gates(OwnStrength):
    """g <- max(0, g - rate / price (dL/dg + rho price)) of every index, multiplied into side A.

    With one rate for all, gates would close in the order of prices. It is bounded for small prices.
    """

    def __init__(self, compressor: Compressor):
        super().__init__(compressor)
        state, self._rate = self._state, 0.0
        self.gates = {name: torch.ones(size) for name, size in state.widths().items()}
        cut_ = state.cut_

        def followed_(decision: Decision, when: str) -> None:
            cut_(decision, when)
            widths = state.widths()
            self.gates = {name: self.gates[name][decision.keeps[name]] for name in widths}

        state.cut_ = followed_  # type: ignore[method-assign]

    def first_strength(self) -> float:
        return WORTH * float(self._scalars.smoothed) / self._state.fma

    def shrink_(self, lr: float, strength: float) -> None:
        plan, course = self._state.plan, self.course
        weight, penalty, prices = plan.store.weight, plan.penalty, plan.prices
        if self.typical is None:
            descent = REACHED * course.steps - course.descent_at
            self._rate = 1 / (strength * descent)
            self.typical = float(np.median(np.concatenate([*prices.values()])))
        slopes = penalty.group_sums(weight, plan.store.grad)
        factors = torch.ones_like(slopes)
        for name, span in penalty.ranges.items():
            gate, side = self.gates[name], span.side("a")
            price = torch.from_numpy(prices[name]).to(gate)
            # The derivative by the gate, of which the weights are multiples.
            slope = slopes[side] / gate.clamp(min=0.05)
            rate = self._rate / price.clamp(min=self.typical)
            new = (gate - rate * (slope + strength * price)).clamp(0, 1.5)
            new = torch.where(gate > 0, new, 0.0)
            factors[side] = _share(new, gate)
            self.gates[name] = new
        weight.mul_(penalty.elements.combined(factors, "product"))


class Vectors(DeviceStep):
    """The penalty of gains and scales alone, which are all vectors of this model."""

    @torch.no_grad()
    def update_(self, loss: Tensor) -> Tensor:
        penalty, store = self._state.plan.penalty, self._state.plan.store
        whole = type(penalty).gradient

        def gradient(weight: Tensor, norms: Tensor | None = None) -> Tensor:
            result = whole(penalty, weight, norms)
            for segment in store.segments.values():
                if len(segment.shape) > 1:
                    result[segment.start : segment.end] = 0
            return result

        penalty.gradient = gradient  # type: ignore[method-assign]
        try:
            return super().update_(loss)
        finally:
            del penalty.gradient


def _share(left: Tensor, norms: Tensor) -> Tensor:
    """What is left of the norms, one where there is none."""
    return torch.where(norms > 0, left.clamp(min=0) / norms.clamp(min=1e-20), 1.0)


def fresh_gauge_(model: Transformer, fresh: Transformer, sweeps: int = 20) -> None:
    """Rescale the sides of every axis, and the levels of normalisers; outputs stay the same.

    Each index gets the ratio of sides, and each normaliser the RMS of gains, of a fresh model.
    """
    tensors, table = named_tensors(model), model.axis_table()
    ratios = {axis.name: _sides(axis.name, fresh) for axis in table.axes}
    for _ in range(sweeps):
        for axis in table.axes:
            aim = ratios[axis.name]
            wanted = (aim[0] / aim[1]).mean()
            now = _sides(axis.name, model)
            reference.rescale_(axis, (wanted * now[1] / now[0]).sqrt(), tensors)
        for norm in table.norms:
            _set_gain_(norm.gain, norm.weight, tensors, named_tensors(fresh))


def _sides(name: str, model: Transformer) -> tuple[Tensor, Tensor]:
    """The RMS of both sides of every index of an axis."""
    tensors = named_tensors(model)
    axis = model.axis_table()[name]
    a, b = (
        reference.side_rms(axis, slots, tensors, reference.side_counts(axis, slots, tensors))
        for _, slots in axis.sides()
    )
    return a, b


@torch.no_grad()
def _set_gain_(gain: str, weight: str, tensors: Tensors, fresh: Tensors) -> None:
    root = float(fresh[gain].square().mean().sqrt() / tensors[gain].square().mean().sqrt())
    tensors[gain].mul_(root)
    tensors[weight].mul_(root**2)
