"""Ranks in accord: rank 0 decides, all do the same, and nobody goes on in another state."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gaugelasso.drop import Decision
from gaugelasso.ranks import Team

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensors: Mapping[str, Tensor], *more: Any) -> str:
    """A digest of the tensors' names, shapes and bits, and of whatever else is JSON-ready.

    Bits are summed where they lie, each element's times an odd number of its own, modulo
    2**64: whatever happens to one element shows, and little is moved to the host.
    """
    sums = torch.stack([_bit_sum(tensor.detach()) for tensor in tensors.values()]).tolist()
    rows = [(name, list(tensors[name].shape), s) for name, s in zip(tensors, sums, strict=True)]
    return hashlib.sha256(json.dumps([sorted(rows), more]).encode()).hexdigest()


def _bit_sum(tensor: Tensor) -> Tensor:
    bits = tensor.reshape(-1).view(_BITS[tensor.element_size()]).long()
    return (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()


def shared_keeps(team: Team, decide: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The keep-sets that rank 0 decides, on every rank; the others are not asked."""
    if team.size == 1:
        return decide()
    mine = decide() if team.rank == 0 else {}
    told = team.tell({name: keep.tolist() for name, keep in mine.items()})
    return {name: torch.tensor(keep, dtype=torch.bool) for name, keep in told.items()}


def shared_decision(team: Team, decide: Callable[[], Decision | None]) -> Decision | None:
    """Rank 0's last word on an event, on every rank."""
    if team.size == 1:
        return decide()
    mine = decide() if team.rank == 0 else None
    removed = team.tell(list(mine.removed) if mine else None)
    if removed is None:
        return None
    return Decision(shared_keeps(team, lambda: mine.keeps if mine else {}), tuple(removed))
