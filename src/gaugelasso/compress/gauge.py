"""Gauge balance: make both sides of every axis equally heavy.

Changes no output of a model: what one side gains the other loses, and riders that must
follow do; by powers of two it changes no bit of it. Also the slow norm weights, which let a
dying channel leave its normaliser smoothly. Knows nothing of losses, budgets or data.

The functions say what is done, axis by axis. `Balance` and `SlowNorms` do the same for a
whole table in a few passes, which is what a run uses; tests hold them to the functions.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from gaugelasso.axes import Axis, AxisTable, Norm, Slot, Tensors, side_rms, spread
from gaugelasso.compress.flat import pick
from gaugelasso.compress.groups import Groups
from gaugelasso.kernels.dispatch import fused_flat

CLIP = 8.0
# The least share of its level that an event leaves to a normaliser on its way down to the anchor:
# a power of four, so that a gain gets there by a power of two.
FALL = 0.25
# The least denominator.
_TINY = 1e-38


def power_of_two(x: Tensor) -> Tensor:
    """The power of two that is nearest to x > 0 by ratio.

    Such a factor changes exponents alone, so a network in any precision calculates with it
    what it calculated before. With others each event is a small random change of every
    weight, by rounding; networks that hold a tight loss in bfloat16 feel that.
    """
    mantissa, _ = torch.frexp(x)  # from a half to below one
    return x / mantissa * torch.where(mantissa < 0.5**0.5, 0.5, 1.0)


def _powers(axis: Axis) -> list[tuple[Slot, int]]:
    """How every slot of an axis follows a balance by c."""
    sides = [(slot, 1) for slot in axis.side_a] + [(slot, -1) for slot in axis.side_b]
    return sides + [(slot, slot.power) for slot in axis.riders if slot.power]


def rescale_(axis: Axis, factor: Tensor, tensors: Tensors) -> None:
    """A <- A c, B <- B / c, riders <- rider c**power, per index."""
    for slot, power in _powers(axis):
        tensor = tensors[slot.tensor]
        tensor.detach().mul_(spread(factor.to(tensor.dtype) ** power, slot, tensors))


def rescale_state_(
    axis: Axis, factor: Tensor, tensors: Tensors, momentum: Tensors, second: Tensors
) -> None:
    """Contravariant state: what a gradient does when its weight is multiplied by c.

    m_A <- m_A / c, m_B <- m_B c; second moments by the square.
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

    Each sweep's c is clipped to [1/clip, clip] and, if `rounded`, a power of two. An index
    that is zero on a side has no balance and is left alone. Returns the total c of each
    axis, for the optimizer's state to follow.
    """
    total: dict[str, Tensor] = {}
    for _ in range(sweeps):
        for axis in table.axes:
            heavy_a = side_rms(axis, axis.side_a, tensors)
            heavy_b = side_rms(axis, axis.side_b, tensors)
            alive = (heavy_a > 0) & (heavy_b > 0)
            ratio = torch.where(alive, heavy_b / heavy_a.clamp(min=_TINY), 1.0)
            factor = ratio.sqrt().clamp(1 / clip, clip)
            factor = power_of_two(factor) if rounded else factor
            rescale_(axis, factor, tensors)
            total[axis.name] = total[axis.name] * factor if axis.name in total else factor
    return total


def imbalance(table: AxisTable, tensors: Tensors) -> dict[str, Tensor]:
    """|log(eps_A / eps_B)| per index: 0 at gauge balance."""
    result = {}
    for axis in table.axes:
        heavy_a = side_rms(axis, axis.side_a, tensors).clamp(min=_TINY)
        heavy_b = side_rms(axis, axis.side_b, tensors).clamp(min=_TINY)
        result[axis.name] = (heavy_a / heavy_b).log().abs()
    return result


def anchor_(
    norm: Norm,
    tensors: Tensors,
    momentum: Tensors,
    second: Tensors,
    share: float,
    rounded: bool = False,
    least: float | Tensor = 0.0,
) -> None:
    """Put a normaliser's level, sum(nu2 E), at `share` of the energy of a typical input.

    nu2 <- nu2 c^2, gamma <- gamma c, state contravariant; c is a power of two, if `rounded`.
    Typical is the geometric mean of E, each input counting as much as it contributes to the
    output, gamma2 E. A normaliser keeps at least `least` of its level.
    """
    gain, weight = tensors[norm.gain], tensors[norm.weight]
    energy = tensors[norm.energy].to(gain.dtype)
    part = gain.detach().square() * energy
    part = part / part.sum().clamp(min=_TINY)
    typical = (part * energy.clamp(min=_TINY).log()).sum().exp()
    level = (weight * energy).sum()
    lift = torch.where((level > 0) & (typical > 0), share * typical / level.clamp(min=_TINY), 1.0)
    root = _root(lift, rounded, least)
    weight.mul_(root.square())
    gain.detach().mul_(root)
    momentum[norm.gain].div_(root)
    if norm.gain in second:
        second[norm.gain].div_(root.square())


def _root(lift: Tensor, rounded: bool, least: float | Tensor) -> Tensor:
    """The factor c of a gain whose normaliser's level is to rise, or fall, by `lift`.

    A lower level makes all weights smaller for the same function, and so steps relatively
    larger: all at once, that throws a network off a loss that it held (docs/development/log.md).
    """
    root = lift.clamp(min=least).sqrt()
    return power_of_two(root) if rounded else root


class Balance:
    """`balance_` and `rescale_state_` on flat storage, in a few passes whatever the table.

    Built anew when the tensors are replaced.
    """

    def __init__(self, table: AxisTable, tensors: Tensors, groups: Groups, rounded: bool = False):
        self._groups, self._rounded = groups, rounded
        # Riders follow as groups of their own, numbered after the others: c**power of side A.
        lead, power = [np.arange(groups.none + 1)], [np.ones(groups.none + 1)]
        starts: dict[tuple[str, int], int] = {}
        end = groups.none + 1
        riders = [(axis.name, slot) for axis in table.axes for slot in axis.riders if slot.power]
        for key in dict.fromkeys((name, slot.power) for name, slot in riders):
            side = groups.ranges[key[0]].side("a")
            lead.append(np.arange(side.start, side.stop))
            power.append(np.full(side.stop - side.start, float(key[1])))
            starts[key], end = end, end + len(lead[-1])
        device = groups.counts.device
        self._lead = torch.from_numpy(np.concatenate(lead)).to(device)
        self._power = torch.from_numpy(np.concatenate(power)).to(device)
        index = torch.arange(end, device=device)
        trained, self._buffers, ids = [], [], [index[:0]]
        for name, slot in riders:
            start, tensor = starts[name, slot.power], tensors[slot.tensor]
            values = index[start : start + groups.ranges[name].width]
            if isinstance(tensor, nn.Parameter):
                trained.append((slot, values))
            else:
                self._buffers.append(tensor)
                ids.append(spread(values, slot, tensors).expand(tensor.shape).reshape(-1))
        # Of two sides the first decides, for both: each for itself, both might round up.
        self._leads = torch.arange(len(groups.partner), device=device) < groups.partner
        self._moves = [*groups.ids, *groups.per_element(trained, tensors)]
        self._buffer_ids = torch.cat(ids)

    def sweep_(
        self, weight: Tensor, momentum: Tensor, second: Tensor, clip: float = CLIP
    ) -> Tensor:
        """One sweep; weights and riders follow, the state contravariantly. Returns c by group.

        All are flat; `second` holds the state of the last elements, as many as it has. Side B
        has 1/c: sqrt(eps of the other side / eps of its own) either way.
        """
        groups = self._groups
        factor = weight.new_ones(groups.none + 1)
        for number, wave in enumerate(groups.waves):
            scaled = weight * self._along(self._follow(factor)) if number else weight
            total = groups.sums(scaled.square(), number)
            own = (total / groups.counts[wave].clamp(min=1)).sqrt()
            other = own[groups.partner[wave] - wave.start]
            ratio = torch.where((own > 0) & (other > 0), other / own, 1.0)
            new = ratio.sqrt().clamp(1 / clip, clip)
            new = power_of_two(new) if self._rounded else new
            mirrored = 1 / new[groups.partner[wave] - wave.start]
            factor[wave] = torch.where(self._leads[wave], new, mirrored)
        every = self._follow(factor)
        along = self._along(every)
        weight.mul_(along)
        momentum.div_(along)
        second.div_(along[len(weight) - len(second) :].square())
        parts = every[self._buffer_ids].split([buffer.numel() for buffer in self._buffers])
        for buffer, part in zip(self._buffers, parts, strict=True):
            buffer.mul_(part.view(buffer.shape))
        return factor

    def _follow(self, factor: Tensor) -> Tensor:
        """The factors of the groups, then those of the riders."""
        return factor[self._lead] ** self._power.to(factor)

    def _along(self, every: Tensor) -> Tensor:
        """The product of the factors that each element moves with."""
        result = pick(every, self._moves[0])
        for ids in self._moves[1:]:
            result.mul_(pick(every, ids))
        return result


class SlowNorms:
    """The slow weights of several normalisers, which follow their gains in a few passes.

    Normalisers are rows of one padded matrix. Build anew when the tensors are replaced.
    """

    def __init__(self, norms: Sequence[Norm], tensors: Tensors, rounded: bool = False):
        self._rounded = rounded  # anchor by powers of two
        self._names = [norm.gain for norm in norms]
        self._gains = [tensors[norm.gain].detach() for norm in norms]
        self._weights = [tensors[norm.weight] for norm in norms]
        self._energies = [tensors[norm.energy] for norm in norms]
        self._sizes = [len(weight) for weight in self._weights]
        device = self._weights[0].device if norms else None
        columns = torch.arange(max(self._sizes, default=0), device=device)
        sizes = torch.tensor(self._sizes, device=device)[:, None]
        self._real = columns < sizes
        starts = sizes.cumsum(0) - sizes
        self._index = torch.where(self._real, starts + columns, 0)
        self._place = self._real.flatten().nonzero().squeeze(1)
        # A fused pass goes to the tensors where they lie; held here, they stay there.
        rows = self._weights, self._gains, self._energies
        self._fusible = all(
            t.is_contiguous() and t.dtype is torch.float32 for row in rows for t in row
        )
        self._widths = sizes.flatten()

    @cached_property
    def _addresses(self) -> Tensor:
        """[3, normalisers]: where slow weights, gains and energies lie."""
        rows = self._weights, self._gains, self._energies
        addresses = [[t.data_ptr() for t in row] for row in rows]
        return torch.tensor(addresses, dtype=torch.long, device=self._weights[0].device)

    def follow_(self, rate: Tensor) -> None:
        """nu2 <- (1 - rate) nu2 + rate s gamma2, with s = sum(nu2 E) / sum(gamma2 E).

        E is the mean square of the normaliser's inputs; s keeps the mean normaliser
        where it is. Meant for every step at a small rate: the same change at once, at an
        event, is a shock where one input rules the normaliser.
        """
        if not self._weights:
            return
        if self._fusible and fused_flat(rate):
            from gaugelasso.kernels.gpu.gauge import follow_

            follow_(self._addresses, self._widths, rate, _TINY)
            for weight in self._weights:
                increment_version(weight)  # autograd does not see a kernel write
            return
        weight, gain, energy = self._rows()
        aim = gain.square()
        there = (aim * energy).sum(1, keepdim=True)
        scale = (weight * energy).sum(1, keepdim=True) / there.clamp(min=_TINY)
        # Without energy or gain there is nothing to follow, nor where energy is no number.
        new = torch.where((rate > 0) & (there > 0), weight.lerp(scale * aim, rate), weight)
        torch._foreach_copy_(self._weights, new.flatten()[self._place].split(self._sizes))

    def anchor_(
        self, momentum: Tensors, second: Tensors, share: float, least: float | Tensor = 0.0
    ) -> None:
        """`anchor_` of every normaliser."""
        if not self._weights:
            return
        weight, gain, energy = self._rows()
        part = gain.square() * energy
        part = part / part.sum(1, keepdim=True).clamp(min=_TINY)
        typical = (part * energy.clamp(min=_TINY).log()).sum(1, keepdim=True).exp()
        level = (weight * energy).sum(1, keepdim=True)
        aim = share * typical / level.clamp(min=_TINY)
        lift = torch.where((level > 0) & (typical > 0), aim, 1.0)
        root = _root(lift, self._rounded, least).expand(weight.shape)
        roots = root.flatten()[self._place].split(self._sizes)
        lifts = torch._foreach_mul(roots, roots)
        torch._foreach_mul_(self._weights, lifts)
        torch._foreach_mul_(self._gains, roots)
        torch._foreach_div_([momentum[name] for name in self._names], roots)
        torch._foreach_div_([second[name] for name in self._names], lifts)

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slow weights, gains and energies as padded matrices, a row for each normaliser."""
        weight = torch.cat(self._weights)[self._index]
        gain = torch.cat(self._gains)[self._index]
        return weight, gain, torch.cat(self._energies)[self._index] * self._real
