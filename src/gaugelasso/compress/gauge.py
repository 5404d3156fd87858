"""Gauge balance: make both sides of every axis equally heavy.

Changes no output of a model: one side is multiplied by c, the other divided by it, and riders
follow. With powers of two, no bit of the output changes. Also updates the slow norm weights,
through which a fading channel leaves its normaliser smoothly. Knows nothing of losses, budgets
or data.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from gaugelasso.axes import AxisTable, Norm, Tensors, spread
from gaugelasso.compress.flat_optimizer import StateVector, scale_
from gaugelasso.compress.gauge_factors import CLIP, TINY, anchor_factor, balance_factor
from gaugelasso.compress.groups import Groups

# Documented as `gaugelasso.gauge.balance_` and `.rescale_`; nothing here uses them.
from gaugelasso.compress.reference import balance_, rescale_
from gaugelasso.kernels.dispatch import fused_flat

__all__ = ["CLIP", "FALL", "Balance", "SlowNorms", "balance_", "rescale_"]

# The smallest share of its level that one event leaves to a normaliser on its way down to the
# anchor. A power of four, so that the gain's factor is a power of two.
FALL = 0.25


class Balance:
    """Gauge Sinkhorn on flat storage: a few passes for any table.

    Does what `reference.balance_` and `reference.rescale_state_` describe. Built again whenever
    the tensors are replaced.
    """

    def __init__(self, table: AxisTable, tensors: Tensors, groups: Groups, rounded: bool = False):
        self._groups, self._rounded = groups, rounded
        # Riders follow by c**power of side A, as extra groups with numbers after the others.
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
        # Side A's factor decides for both sides: rounded separately, both could round up.
        self._leads = torch.arange(len(groups.partner), device=device) < groups.partner
        # None where every axis may be rescaled, which saves a pass.
        held = [groups.ranges[axis.name] for axis in table.axes if not axis.gauge]
        self._held: Tensor | None = None
        if held:
            self._held = torch.zeros(len(groups.partner), dtype=torch.bool, device=device)
            for span in held:
                self._held[span.start : span.end] = True
        self._maps = [groups.elements]
        if trained:
            self._maps.append(groups.element_map(trained, tensors))
        self._buffer_ids = torch.cat(ids)

    def sweep_(self, weight: Tensor, state: Sequence[StateVector], clip: float = CLIP) -> Tensor:
        """One sweep over all axes; returns c of every group.

        The flat weight and the riders are multiplied, and each state vector by its power of the
        same factors. On both sides c is sqrt(eps of the other side / eps of this side), so side B
        has 1/c of side A.
        """
        groups = self._groups
        factor = weight.new_ones(groups.none + 1)
        for number, wave in enumerate(groups.waves):
            total = self._square_sums(weight, factor, number)
            own = (total / groups.counts[wave].clamp(min=1)).sqrt()
            other = own[groups.partner[wave] - wave.start]
            ratio = torch.where((own > 0) & (other > 0), other / own, 1.0)
            if self._held is not None:
                ratio.masked_fill_(self._held[wave], 1.0)
            new = balance_factor(ratio, clip, self._rounded)
            mirrored = 1 / new[groups.partner[wave] - wave.start]
            factor[wave] = torch.where(self._leads[wave], new, mirrored)
        every = self._follow(factor)
        along = self._along(every)
        weight.mul_(along)
        for vector in state:
            vector.rescale_(along)
        parts = every[self._buffer_ids].split([buffer.numel() for buffer in self._buffers])
        for buffer, part in zip(self._buffers, parts, strict=True):
            buffer.mul_(part.view(buffer.shape))
        return factor

    def _square_sums(self, weight: Tensor, factor: Tensor, wave: int) -> Tensor:
        """Sums of squares of the groups of a wave, after the factors of the waves before it."""
        if wave:
            weight = self._along(self._follow(factor)).mul_(weight)
        return self._groups.sums(weight, wave, squared=True)

    def _follow(self, factor: Tensor) -> Tensor:
        """The factors of the groups, followed by those of the riders."""
        return factor[self._lead] ** self._power.to(factor)

    def _along(self, every: Tensor) -> Tensor:
        """For each element, the product of all factors that apply to it."""
        first, *others = self._maps
        result = first.combined(every, "product")
        for other in others:
            result.mul_(other.combined(every, "product"))
        return result


class SlowNorms:
    """The slow weights of all normalisers, updated in a few passes.

    Normalisers are rows of one padded matrix. Built again whenever the tensors are replaced.
    """

    def __init__(self, norms: Sequence[Norm], tensors: Tensors, rounded: bool = False):
        self._rounded = rounded  # anchor by powers of two
        norms = [norm for norm in norms if norm.follows]
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
        # The fused pass works on addresses: these references keep the tensors alive.
        rows = self._weights, self._gains, self._energies
        self._fusible = all(
            t.is_contiguous() and t.dtype is torch.float32 for row in rows for t in row
        )
        self._widths = sizes.flatten()
        self._free = torch.tensor([[not norm.has_eps] for norm in norms], device=device)

    @cached_property
    def _addresses(self) -> Tensor:
        """[3, normalisers]: the addresses of slow weights, gains and energies."""
        rows = self._weights, self._gains, self._energies
        addresses = [[t.data_ptr() for t in row] for row in rows]
        return torch.tensor(addresses, dtype=torch.long, device=self._weights[0].device)

    def follow_(self, rate: Tensor) -> None:
        """nu2 <- (1 - rate) nu2 + rate s gamma2, with s = sum(nu2 E) / sum(gamma2 E).

        E is the mean square of the normaliser's inputs; s keeps the normaliser's mean where it
        is. Called at every step with a small rate: the same change at once, at an event, is a
        shock where one input dominates the normaliser.
        """
        if not self._weights:
            return
        if self._fusible and fused_flat(rate):
            from gaugelasso.kernels.gpu.gauge import follow_

            follow_(self._addresses, self._widths, rate, TINY)
            for weight in self._weights:
                increment_version(weight)  # autograd does not see that a kernel writes
            return
        weight, gain, energy = self._rows()
        aim = gain.square()
        there = (aim * energy).sum(1, keepdim=True)
        scale = (weight * energy).sum(1, keepdim=True) / there.clamp(min=TINY)
        # False for a NaN energy, and where there is no energy or no gain: weights stay.
        new = torch.where((rate > 0) & (there > 0), weight.lerp(scale * aim, rate), weight)
        torch._foreach_copy_(self._weights, new.flatten()[self._place].split(self._sizes))

    def anchor_(
        self,
        state: Sequence[tuple[int, Tensors]],
        share: float,
        least: float | Tensor = 0.0,
    ) -> None:
        """Set every normaliser's level, as `reference.anchor_` describes.

        `state` holds the power and the views of each of the optimizer's state vectors.
        """
        if not self._weights:
            return
        weight, gain, energy = self._rows()
        part = gain.square() * energy
        part = part / part.sum(1, keepdim=True).clamp(min=TINY)
        typical = (part * energy.clamp(min=TINY).log()).sum(1, keepdim=True).exp()
        level = (weight * energy).sum(1, keepdim=True)
        aim = share * typical / level.clamp(min=TINY)
        lift = torch.where((level > 0) & (typical > 0) & self._free, aim, 1.0)
        root = anchor_factor(lift, self._rounded, least).expand(weight.shape)
        roots = list(root.flatten()[self._place].split(self._sizes))
        scale_(self._weights, roots, 2)
        scale_(self._gains, roots, 1)
        for power, views in state:
            scale_([views[name] for name in self._names], roots, power)

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slow weights, gains and energies as padded matrices, a row for each normaliser."""
        weight = torch.cat(self._weights)[self._index]
        gain = torch.cat(self._gains)[self._index]
        return weight, gain, torch.cat(self._energies)[self._index] * self._real
