"""The guard: bounds how much one event may raise the loss of the batch that it is held on.

A split, balance or cut that costs more is undone as a whole. Of the indices that are to be cut,
only those that the batch needs are kept. Knows losses; the caller provides each change and its
undo.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gaugelasso.axes import Axis, AxisTable, Slot, Tensors, spread
from gaugelasso.compress.measuring import in_eval_mode

# The most forward passes that one event spends on finding which drops the batch needs. At the
# default interval this is about the work of the training steps between two events.
MAX_PROBES = 256


class Guard:
    """Holds one event's loss to `allowance` above the loss before it; allows all without a probe.

    `before` is the loss before the event, `loss` the loss now. `undone` maps each change that was
    undone to the loss that it had led to.
    """

    def __init__(self, model: nn.Module, probe: Callable[[], float] | None, allowance: float):
        self._model, self._probe = model, probe
        self.before = self.loss = self._measure() if probe else None
        self._bound = self._above(allowance)
        self.undone: dict[str, float] = {}

    @property
    def measures(self) -> bool:
        """Whether there is a probe, and a finite loss before the event."""
        return math.isfinite(self._bound)

    def try_(
        self,
        name: str,
        change_: Callable[[], None],
        snapshot: Callable[[], Callable[[], None]],
        allowance: float | None = None,
    ) -> bool:
        """Make a change, and undo it if the loss exceeds the bound; True if the change stays.

        `snapshot` is called before the change and returns the function that undoes it. With an
        `allowance` the bound is so much above the loss before the event.
        """
        if self._probe is None:
            change_()
            return True
        undo = snapshot()
        change_()
        loss = self._measure()
        if loss <= (self._bound if allowance is None else self._above(allowance)):
            self.loss = loss
            return True
        undo()
        self.undone[name] = loss
        return False

    def keep_needed(
        self, table: AxisTable, tensors: Tensors, keeps: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The keep-sets, with the indices that the batch needs kept too."""
        if self._probe is None:
            return keeps
        if not math.isfinite(self._bound):
            return {name: torch.ones_like(keep) for name, keep in keeps.items()}
        return keep_what_batch_needs(table, tensors, keeps, self._measure, self._bound)

    def allows(self, table: AxisTable, tensors: Tensors, keeps: dict[str, Tensor]) -> bool:
        """Whether the loss stays within the bound when all these drops are made."""
        if self._probe is None:
            return True
        return self.loss_without(table, tensors, keeps) <= self._bound

    def loss_without(self, table: AxisTable, tensors: Tensors, keeps: dict[str, Tensor]) -> float:
        """The loss when all these drops are made. Needs a probe."""
        with temporarily_zeroed(table, tensors, keeps):
            return self._measure()

    def _above(self, allowance: float) -> float:
        """The bound so much above the loss before; no change is within it if that is not finite."""
        if self.before is None or not math.isfinite(self.before):
            return -math.inf
        return self.before + allowance

    def _measure(self) -> float:
        """The probe's loss, in eval mode so that the model records no input energies."""
        assert self._probe is not None
        with in_eval_mode(self._model):
            return self._probe()


@contextmanager
def temporarily_zeroed(
    table: AxisTable, tensors: Tensors, keeps: dict[str, Tensor]
) -> Iterator[None]:
    """Within the context, side A of every dropped index is zero, as if the index were cut.

    Side B is zero too where a rider may be added to side A (a bias), or where there is no gauge:
    an index with a zero side A may then still contribute. An index that is read through
    normalisers, whose gains are on either side, leaves them too. All values are restored
    afterwards.
    """
    slow = {norm.gain: norm.weight for norm in table.norms}
    saved = []
    for name, keep in keeps.items():
        if bool(keep.all()):
            continue
        axis = table[name]
        own = (slot.tensor for slot in axis.side_a + axis.side_b if slot.link is None)
        weights = tuple(Slot(slow[tensor]) for tensor in own if tensor in slow)
        for slot in _silencing(axis) + weights:
            tensor = tensors[slot.tensor].detach()
            saved.append((tensor, tensor.clone()))
            tensor.mul_(spread(keep.to(tensor), slot, tensors))
    try:
        yield
    finally:
        for tensor, values in reversed(saved):
            tensor.copy_(values)


def _silencing(axis: Axis) -> tuple[Slot, ...]:
    """The slots that are zero when an index has no effect."""
    alone = axis.gauge and not any(slot.power % 2 for slot in axis.riders)
    return axis.side_a if alone else axis.side_a + axis.side_b


def keep_what_batch_needs(
    table: AxisTable,
    tensors: Tensors,
    keeps: dict[str, Tensor],
    probe: Callable[[], float],
    bound: float,
) -> dict[str, Tensor]:
    """Keep-sets without the drops that a batch needs; the rest together stay within `bound`.

    An index near zero may still matter: a reader with a large gain can depend on a channel that
    is one step from zero. All drops are tried together first. A block that raises the loss above
    `bound` is tried by halves, so a few needed indices among many cost few probes. Where only
    some of several drops fit, the first ones in the table's order are made.

    Each probe is a forward pass. After MAX_PROBES of them the search ends, and every drop that is
    not admitted by then is kept. The next event tries it again.
    """
    admitted = {name: torch.ones_like(keep) for name, keep in keeps.items()}
    drops = [(name, i) for name, keep in keeps.items() for i in (~keep).nonzero().view(-1).tolist()]
    untried = [drops] if drops else []  # a stack: the first block in the table's order is on top
    for _ in range(MAX_PROBES):
        if not untried:
            break
        block = untried.pop()
        trial = {name: keep.clone() for name, keep in admitted.items()}
        for name, index in block:
            trial[name][index] = False
        with temporarily_zeroed(table, tensors, trial):
            fits = probe() <= bound
        if fits:
            admitted = trial
        elif len(block) > 1:
            half = len(block) // 2
            untried += [block[half:], block[:half]]
    return admitted
