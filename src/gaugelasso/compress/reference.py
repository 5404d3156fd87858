"""Readable references of the equations, one axis or one normaliser at a time.

No run executes these functions. Tests compare each of them with the function that runs, which
does the same for a whole table in a few passes over flat storage. docs/reference/equations.md
names both.
"""

import numpy as np
import torch
from torch import Tensor

from gaugelasso.axes import Axis, AxisTable, Norm, Side, Slot, Tensors, spread, width
from gaugelasso.compress.gauge_factors import CLIP, TINY, anchor_factor, balance_factor
from gaugelasso.compress.penalty import Calibration, Form

# --- the slice of an index on one side -----------------------------------------------------


def collect(data: Tensor, slot: Slot, tensors: Tensors, size: int) -> Tensor:
    """Sum `data`, of the shape of the slot's tensor, over all dims but that of the indices."""
    others = [dim for dim in range(data.ndim) if dim != slot.dim]
    sums = data.sum(dim=others) if others else data
    if slot.link is None:
        return sums
    return sums.new_zeros(size).index_add(0, tensors[slot.link], sums)


def side_counts(axis: Axis, slots: tuple[Slot, ...], tensors: Tensors) -> Tensor:
    """n: the number of elements of each index's slice on one side."""
    size = width(axis, tensors)
    ones = [torch.ones_like(tensors[slot.tensor], dtype=torch.float64) for slot in slots]
    counts = [collect(one, slot, tensors, size) for one, slot in zip(ones, slots, strict=True)]
    return torch.stack(counts).sum(0)


def side_norms(axis: Axis, slots: tuple[Slot, ...], tensors: Tensors) -> Tensor:
    """||T||: the joint Frobenius norm of each index's slice on one side."""
    size = width(axis, tensors)
    squares = [collect(tensors[slot.tensor].square(), slot, tensors, size) for slot in slots]
    return torch.stack(squares).sum(0).sqrt()


@torch.no_grad()
def side_rms(
    axis: Axis, slots: tuple[Slot, ...], tensors: Tensors, counts: Tensor | None = None
) -> Tensor:
    """epsilon = ||T|| / sqrt(n), per index; 0 where the side is empty.

    `counts` are those of `side_counts`; they are computed if not given.
    """
    norms = side_norms(axis, slots, tensors)
    counts = side_counts(axis, slots, tensors) if counts is None else counts
    return norms / counts.to(norms).clamp(min=1).sqrt()


# --- the penalty -----------------------------------------------------------------------------


def side_strengths(
    axis: Axis, side: Side, tensors: Tensors, price: np.ndarray, calibration: Calibration
) -> Tensor:
    """lambda of each index on one side, without rho.

    - efficiency: r / sqrt(n)
    - geometry:   sqrt(n of the other side)
    """
    slots = dict(axis.sides())
    if calibration == "geometry":
        return side_counts(axis, slots["b" if side == "a" else "a"], tensors).clamp(min=1).sqrt()
    counts = side_counts(axis, slots[side], tensors)
    return torch.from_numpy(price).to(counts) / counts.clamp(min=1).sqrt()


def penalty_value(
    table: AxisTable,
    tensors: Tensors,
    prices: dict[str, np.ndarray],
    form: Form = "symmetric",
    calibration: Calibration = "efficiency",
) -> Tensor:
    """The penalty without rho, differentiable in the tensors.

    - symmetric:    sum over axes and indices of lambda_A ||A|| + lambda_B ||B||
    - one_sided:    lambda_A ||A|| alone
    - product_norm: lambda_A ||A|| lambda_B ||B|| / r
    """
    total = torch.zeros((), dtype=torch.float64)
    for axis in table.axes:
        price = prices[axis.name]
        a, b = (
            side_strengths(axis, side, tensors, price, calibration)
            * side_norms(axis, slots, tensors)
            for side, slots in axis.sides()
        )
        if form == "symmetric":
            total = total + (a + b).sum()
        elif form == "one_sided":
            total = total + a.sum()
        else:
            r = torch.from_numpy(price).to(a)
            total = total + torch.where(r > 0, a * b / r, 0.0).sum()
    return total


def balanced_utility(
    table: AxisTable,
    tensors: Tensors,
    prices: dict[str, np.ndarray],
    calibration: Calibration = "efficiency",
) -> dict[str, Tensor]:
    """GM_j = sqrt(lambda_A lambda_B ||A_j|| ||B_j||): the utility where groups do not overlap."""
    result = {}
    for axis in table.axes:
        a, b = (
            side_strengths(axis, side, tensors, prices[axis.name], calibration)
            * side_norms(axis, slots, tensors)
            for side, slots in axis.sides()
        )
        result[axis.name] = (a * b).sqrt().detach()
    return result


# --- balance ---------------------------------------------------------------------------------


def _powers(axis: Axis) -> list[tuple[Slot, int]]:
    """The power of c that every slot of an axis is multiplied by."""
    sides = [(slot, 1) for slot in axis.side_a] + [(slot, -1) for slot in axis.side_b]
    return sides + [(slot, slot.power) for slot in axis.riders if slot.power]


def rescale_(axis: Axis, factor: Tensor, tensors: Tensors) -> None:
    """A <- A c, B <- B / c, rider <- rider c**power, per index."""
    for slot, power in _powers(axis):
        tensor = tensors[slot.tensor]
        tensor.detach().mul_(spread(factor.to(tensor.dtype) ** power, slot, tensors))


def rescale_state_(
    axis: Axis, factor: Tensor, tensors: Tensors, momentum: Tensors, second: Tensors
) -> None:
    """m_A <- m_A / c, m_B <- m_B c, second moments by the square.

    The state is contravariant: it changes as a gradient does when its weight is multiplied by c.
    """
    for slot, power in _powers(axis):
        along = spread(factor, slot, tensors)
        if slot.tensor in momentum:
            momentum[slot.tensor].mul_(along**-power)
        if slot.tensor in second:
            second[slot.tensor].mul_(along ** (-2 * power))


def balance_(
    table: AxisTable,
    tensors: Tensors,
    sweeps: int = 3,
    clip: float = CLIP,
    rounded: bool = False,
) -> dict[str, Tensor]:
    """Gauge Sinkhorn: sweeps of c = sqrt(eps_B / eps_A) over all axes, in table order.

    Each sweep's c is clipped to [1/clip, clip] and, if `rounded`, is a power of two. An index
    that is zero on one side has no balance and does not change. Returns the total c of each axis,
    by which the optimizer's state follows. Axes without gauge freedom are left out.
    """
    total: dict[str, Tensor] = {}
    free = [axis for axis in table.axes if axis.gauge]
    counts = [[side_counts(axis, slots, tensors) for _, slots in axis.sides()] for axis in free]
    for _ in range(sweeps):
        for axis, (count_a, count_b) in zip(free, counts, strict=True):
            eps_a = side_rms(axis, axis.side_a, tensors, count_a)
            eps_b = side_rms(axis, axis.side_b, tensors, count_b)
            alive = (eps_a > 0) & (eps_b > 0)
            ratio = torch.where(alive, eps_b / eps_a.clamp(min=TINY), 1.0)
            factor = balance_factor(ratio, clip, rounded)
            rescale_(axis, factor, tensors)
            total[axis.name] = total[axis.name] * factor if axis.name in total else factor
    return total


# --- growth ----------------------------------------------------------------------------------


def procrustes_rows(axis: Axis, q: Tensor, tensors: Tensors, power: int = 1) -> dict[str, Tensor]:
    """T_i <- sum_j Q_ij T_j for the new rows i of both sides; with power -2, Q_ij^2 for Q_ij.

    `tensors` are the weights (power 1), their momentum (-1) or their second moments (-2). Weights
    and momentum change alike, because Q is an isometry.
    """
    factor = q if power % 2 else q.square()
    grown = {}
    for slot in axis.side_a + axis.side_b:
        if slot.tensor in tensors:
            old = tensors[slot.tensor].unbind(slot.dim)
            rows = [sum(c * part for c, part in zip(row, old, strict=True)) for row in factor]
            grown[slot.tensor] = torch.stack(rows, slot.dim)
    return grown


# --- normalisers -----------------------------------------------------------------------------


def follow_(norm: Norm, tensors: Tensors, rate: float) -> None:
    """nu2 <- (1 - rate) nu2 + rate s gamma2, with s = sum(nu2 E) / sum(gamma2 E).

    E is the mean square of the normaliser's inputs; s keeps the normaliser's mean where it is.
    Weights that do not follow stay as they are, and so do their levels.
    """
    if not norm.follows:
        return
    aim, weight = tensors[norm.gain].detach().square(), tensors[norm.weight]
    energy = tensors[norm.energy].to(aim.dtype)
    contribution = (aim * energy).sum()
    if contribution > 0:
        scale = (weight * energy).sum() / contribution
        weight.copy_((1 - rate) * weight + rate * scale * aim)


def anchor_(
    norm: Norm,
    tensors: Tensors,
    momentum: Tensors,
    second: Tensors,
    share: float,
    rounded: bool = False,
    least: float | Tensor = 0.0,
) -> None:
    """Set a normaliser's level, sum(nu2 E), to `share` of the energy of a typical input.

    nu2 <- nu2 c^2, gamma <- gamma c, state contravariant; c is a power of two if `rounded`. The
    typical energy is the geometric mean of E, weighted by what each input contributes to the
    output, gamma2 E. The level falls to no less than `least` of what it was. A normaliser with an
    eps stays as it is.
    """
    if norm.has_eps or not norm.follows:
        return
    gain, weight = tensors[norm.gain], tensors[norm.weight]
    energy = tensors[norm.energy].to(gain.dtype)
    part = gain.detach().square() * energy
    part = part / part.sum().clamp(min=TINY)
    typical = (part * energy.clamp(min=TINY).log()).sum().exp()
    level = (weight * energy).sum()
    lift = torch.where((level > 0) & (typical > 0), share * typical / level.clamp(min=TINY), 1.0)
    factor = anchor_factor(lift, rounded, least)
    weight.mul_(factor.square())
    gain.detach().mul_(factor)
    momentum[norm.gain].div_(factor)
    if norm.gain in second:
        second[norm.gain].div_(factor.square())
