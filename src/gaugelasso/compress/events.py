"""Structural events as data: their rules, what hooks receive before a cut, their record."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Drop:
    """The indices of one axis that an event would cut, as hooks receive them before the cut."""

    step: int
    axis: str
    indices: tuple[int, ...]
    rms: tuple[float, ...]
    prices: tuple[float, ...]


# Called for each axis that is to lose indices; returns the indices that may go.
Answer = tuple[int, ...] | list[int] | set[int] | frozenset[int] | range | bool | None
DropHook = Callable[[Drop], Answer]


# The share of the work that one event cuts where channels go by their harm.
CUT_SHARE = 0.02
# The removal of a whole operator may raise the loss by so many times as much as another change, and
# by that share of it at most.
_OPERATOR_TIMES, _OPERATOR_SHARE = 4.0, 0.1


def allowances(loss: float, tolerance: float, bound: float | None) -> tuple[float, float]:
    """How much an event, and one that removes an operator, may raise the loss of a batch.

    `loss` is the one to press towards, `tolerance` the share of it that no event exceeds, `bound`
    what the course of a run allows an event without an operator.
    """
    most = tolerance * abs(loss)
    event = most if bound is None else min(most, bound)
    return event, min(most, _OPERATOR_SHARE * abs(loss), _OPERATOR_TIMES * event)


@dataclass(frozen=True)
class EventRules:
    """What one event goes by.

    An index is near zero if its RMS is at most `threshold`. `pressing` says whether the loss has
    margin to its target. The event may raise the probe's loss by `loss_allowance`, and where a
    whole operator goes by `operator_allowance`. Where channels go by their harm, it cuts about
    `cut_share` of the work. Events are held every `interval` steps, if at all. `left` is how many
    steps the run has left, as far as it is known.
    """

    step: int
    threshold: float
    pressing: bool
    fma_target: float
    loss_allowance: float
    probe: Callable[[], float] | None
    hooks: Sequence[DropHook]
    cut_share: float = CUT_SHARE
    operator_allowance: float = 0.0
    interval: int = 1
    left: float = math.inf


@dataclass(frozen=True)
class Event:
    """What a structural event did. Losses are those of one batch, None without a probe.

    - prices: axis name -> the sum of what its dropped indices saved, each on its own
    - spared: axis name -> indices near zero that stayed because the batch needs them
    - withheld: axis name -> indices that stayed because the work target is met without them
    - splits: the sites that became two, before `loss_balanced` was measured
    - undone: the changes that were undone ("split", "balance", "cut", "operator", "exchange"), with
      the loss of each
    - returned_to: for a rollback, the step of the state that the run went back to
    - exchanged, grown: axis name -> indices that an exchange took, and that it added
    """

    step: int
    fma_before: float
    fma: float
    dropped: dict[str, int]
    prices: dict[str, float]
    removed: tuple[str, ...]
    widths: dict[str, int]
    seconds: float
    loss_before: float | None = None
    loss_balanced: float | None = None
    loss_after: float | None = None
    refused: bool = False
    splits: int = 0
    spared: dict[str, int] = field(default_factory=dict)
    withheld: dict[str, int] = field(default_factory=dict)
    undone: dict[str, float] = field(default_factory=dict)
    returned_to: int | None = None
    exchanged: dict[str, int] = field(default_factory=dict)
    grown: dict[str, int] = field(default_factory=dict)

    @classmethod
    def returned(
        cls,
        step: int,
        to: int,
        fma_before: float,
        fma: float,
        widths: dict[str, int],
        seconds: float,
    ) -> "Event":
        """The record of a rollback to the state of step `to`."""
        return cls(step, fma_before, fma, {}, {}, (), widths, seconds, returned_to=to)

    @property
    def changed(self) -> bool:
        """Whether the widths have changed."""
        return bool(self.dropped or self.exchanged)

    def to_dict(self) -> dict[str, Any]:
        """A row of events.jsonl. An event without an exchange has no keys for it."""
        row = asdict(self)
        for key in ("exchanged", "grown"):
            if not row[key]:
                del row[key]
        return row


def consult_(
    hooks: Sequence[DropHook],
    step: int,
    keeps: Mapping[str, Tensor],
    rms: Mapping[str, Tensor],
    prices: Mapping[str, np.ndarray],
) -> None:
    """Keep the indices that a hook vetoes; each hook receives what the hooks before it allow."""
    for name, keep in keeps.items():
        for hook in hooks:
            going = (~keep).nonzero().squeeze(1)
            if not len(going):
                break
            drop = Drop(
                step,
                name,
                tuple(going.tolist()),
                tuple(rms[name][going].tolist()),
                tuple(prices[name][going.numpy()].tolist()),
            )
            allowed = _allowed(hook, drop)
            keep[[i for i in drop.indices if i not in allowed]] = True


def _allowed(hook: DropHook, drop: Drop) -> set[int]:
    """The indices that a hook lets go: for None and True all of the drop, for False none.

    TypeError for an answer that is not a bool, None or a collection of ints. A tensor is refused
    too: its elements compare as tensors, and it may be a mask as well as a list of indices.
    """
    answer = hook(drop)
    if answer is None or answer is True:
        return set(drop.indices)
    if answer is False:
        return set()
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    wanted = "return True, False, None, or a tuple, list, set or range of ints"
    if not isinstance(answer, tuple | list | set | frozenset | range):
        raise TypeError(f"drop hook {name!r} returned a value of type {_kind(answer)}; {wanted}")
    for index in answer:
        if not isinstance(index, Integral) or isinstance(index, bool):
            found = f"a {_kind(answer)} that contains a value of type {_kind(index)}"
            raise TypeError(f"drop hook {name!r} returned {found}; {wanted}")
    return {int(index) for index in answer}


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
