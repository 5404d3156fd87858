"""Harm: how much the loss depends on each index, measured from the gradients of training.

For pretrained weights. There a channel that matters little may have large weights, so its distance
to zero says little. The derivative of the loss by the scale of a channel is the sum of weight
times gradient over one of its sides. It is the same for both sides, in any gauge. Its mean square
over batches estimates what the loss would rise by if the channel were cut, up to a factor that all
channels share (Theis et al. 2018, Molchanov et al. 2019). For a model that has learned its task
exactly there are no gradients, and harms are noise: such a model needs pressure.

A part of the state that checkpoints hold. Decides nothing.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gaugelasso.axes import AxisTable, Side, Tensors
from gaugelasso.compress.groups import GroupRange
from gaugelasso.compress.penalty import Penalty

# The mean goes over all steps at first, and then over about so many.
_STEPS = 50
_SIDES: tuple[Side, ...] = ("a", "b")


class Harm:
    """One mean square for each lasso group, so two for each index, in the penalty's order."""

    def __init__(self, penalty: Penalty, like: Tensor):
        self._ranges, self._partner = penalty.ranges, penalty.partner
        self.values = like.new_zeros(penalty.none + 1)
        self.seen = like.new_zeros(())  # the number of steps in the mean

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, for checkpoints."""
        return {"harm": self.values, "harm_seen": self.seen}

    def observe_(self, penalty: Penalty, weight: Tensor, gradient: Tensor, sound: Tensor) -> None:
        """Take in the gradient of a step; nothing changes where the step is not sound."""
        slope = penalty.group_sums(weight, gradient)
        # The two sides differ where there is no gauge between them.
        square = (slope * slope[self._partner]).abs()
        self.seen.add_(sound)
        share = (1 / self.seen.clamp(min=1)).clamp(min=1 / _STEPS) * sound
        self.values.add_(torch.where(sound, square - self.values, 0.0) * share)

    def by_axis(self) -> dict[str, Tensor]:
        """Axis name -> the harm of each index, on the CPU."""
        values = self.values.cpu()
        return {name: values[span.side("a")] for name, span in self._ranges.items()}

    def follow_cut_(self, penalty: Penalty, keeps: Mapping[str, Tensor]) -> None:
        """The same for the penalty of a structure after a cut, which keeps these indices.

        Vectors are replaced, so that the old ones can be put back.
        """
        old, before = self.values, self._ranges
        self.attach(penalty)
        order = sorted(self._ranges, key=lambda name: self._ranges[name].start)
        kept = _groups([(before[name], keeps[name]) for name in order])
        self.values[: len(kept)] = old[kept.to(old.device)]

    def raise_(self, keeps: Mapping[str, Tensor], factor: float) -> None:
        """Multiply the harm of the indices that are not kept: cutting them cost too much."""
        going = _groups([(self._ranges[name], ~keep) for name, keep in keeps.items()])
        self.values[going.to(self.values.device)] *= factor

    def attach(self, penalty: Penalty) -> None:
        """Fit another structure, with nothing known of it."""
        self._ranges, self._partner = penalty.ranges, penalty.partner
        self.values = self.values.new_zeros(penalty.none + 1)

    def restore_(self, values: Tensor | None, penalty: Penalty) -> None:
        """Fit an earlier structure, with the values of then."""
        self.attach(penalty)
        self.values = self.values if values is None else values


def _groups(chosen: Iterable[tuple[GroupRange, Tensor]]) -> Tensor:
    """The groups of the chosen indices, on the CPU: one transfer for all axes takes less time."""
    return torch.cat([
        indices.nonzero().squeeze(1) + span.side(side).start
        for span, indices in chosen
        for side in _SIDES
    ])  # fmt: skip


def levels(table: AxisTable, tensors: Tensors) -> dict[str, Tensor]:
    """The level of every normaliser, by the name of its slow weights."""
    return {
        norm.weight: torch.dot(tensors[norm.weight], tensors[norm.energy]) for norm in table.norms
    }


def restore_levels_(table: AxisTable, tensors: Tensors, before: Mapping[str, Tensor]) -> None:
    """Scale the slow weights of each normaliser so that it has the level it had before a cut.

    A site that is cut while its weights are large leaves the normaliser at once. What the others
    are divided by must not change with that.
    """
    if not (after := levels(table, tensors)):
        return
    scale = torch.stack([before[name] for name in after]) / torch.stack(list(after.values()))
    scale = torch.where(scale.isfinite() & (scale > 0), scale, 1.0)
    torch._foreach_mul_([tensors[name] for name in after], list(scale.unbind()))
