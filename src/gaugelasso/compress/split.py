"""Split: separate sites for two signals that use one site at different stages.

A residual site can carry one signal early in the network and a much larger one later. Its gauge
then fits the larger one. The smaller one looks as near to zero as a fading channel, although its
readers depend on it. What is left of the early signal in the late one is negligible, so the late
writers and readers can move to a new site, at no cost. Knows nothing of losses or training.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gaugelasso.axes import Axis, AxisTable, Compressible, Slot, Tensors, named_tensors, width
from gaugelasso.compress.flat import replace_tensor, tensor_places


@dataclass(frozen=True)
class Split:
    """Every writer and reader of `index` of an axis after `stage` moves to a new index."""

    axis: str
    index: int
    stage: int


def find_splits(table: AxisTable, tensors: Tensors, share: float) -> list[Split]:
    """Splits where the energy of an early read is at most `share` of every later read's energy.

    A write must lie between them. At most one split per index: the earliest.
    """
    energies = {norm.gain: tensors[norm.energy] for norm in table.norms}
    splits = []
    for axis in table.axes:
        if not _divisible(axis, tensors, energies):
            continue
        size = width(axis, tensors)
        writes = np.zeros((len(axis.side_a), size), dtype=bool)
        for k, slot in enumerate(axis.side_a):
            writes[k, tensors[str(slot.link)].cpu().numpy()] = True
        reads = np.full((len(axis.side_b), size), -1.0)  # -1 where nothing is read
        for k, slot in enumerate(axis.side_b):
            reads[k, tensors[str(slot.link)].cpu().numpy()] = energies[slot.tensor].cpu().numpy()
        # Few indices have energies that far apart; only these are examined.
        least = np.where(reads > 0, reads, np.inf).min(0)
        for index in (least <= share * reads.max(0)).nonzero()[0].tolist():
            written = [_stage(s) for k, s in enumerate(axis.side_a) if writes[k, index]]
            energy = zip(axis.side_b, reads[:, index].tolist(), strict=True)
            turn = _turn(written, sorted((_stage(s), e) for s, e in energy if e >= 0), share)
            if turn is not None:
                splits.append(Split(axis.name, index, turn))
    return splits


def _divisible(axis: Axis, tensors: Tensors, energies: Mapping[str, Tensor]) -> bool:
    """Whether an index's slots have stages, all readers have energies, and each can move alone."""
    slots = axis.side_a + axis.side_b
    links = [slot.link for slot in slots]
    ordered = all(slot.link is not None and slot.stage is not None for slot in slots)
    measured = all(slot.tensor in energies for slot in axis.side_b)
    apart = len(set(links)) == len(links) and all(
        slot.link is None or slot.link in links for slot in axis.riders
    )
    bare = not any(isinstance(tensors[slot.tensor], nn.Parameter) for slot in axis.direct())
    return ordered and measured and apart and bare


def _stage(slot: Slot) -> int:
    assert slot.stage is not None
    return slot.stage


def _turn(written: list[int], read: list[tuple[int, float]], share: float) -> int | None:
    """The stage of the last read before a much larger signal is written, or None."""
    for k, (stage, energy) in enumerate(read[:-1]):
        after = read[k + 1 :]
        rewritten = any(stage < writing < after[0][0] for writing in written)
        if rewritten and 0 < energy <= share * min(later for _, later in after):
            return stage
    return None


def split_(model: Compressible, table: AxisTable, splits: list[Split]) -> None:
    """Move the late half of each split to a new index at the end of its axis.

    No parameter changes; position maps and the axis's own buffers are replaced.
    """
    tensors: dict[str, Tensor] = named_tensors(model)
    places = tensor_places(model)
    for axis in table.axes:
        here = [split for split in splits if split.axis == axis.name]
        if here:
            for name, tensor in _extended(axis, tensors, here).items():
                replace_tensor(places, name, tensor)


def _extended(axis: Axis, tensors: Tensors, splits: list[Split]) -> dict[str, Tensor]:
    """The position maps and buffers of an axis after its splits, by name."""
    result, new = {}, width(axis, tensors)
    for slot in axis.linked():
        link = tensors[str(slot.link)].clone()
        for offset, split in enumerate(splits):
            if _stage(slot) > split.stage:
                link[link == split.index] = new + offset
        result[str(slot.link)] = link
    for slot in axis.direct():
        tensor = tensors[slot.tensor]
        halves = torch.tensor([split.index for split in splits], device=tensor.device)
        late = tensor.index_select(slot.dim, halves)
        result[slot.tensor] = torch.cat([tensor, late], slot.dim)
    return result
