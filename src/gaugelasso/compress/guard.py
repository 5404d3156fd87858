"""The guard: an event may cost the batch that it is held on so much, and no more.

What costs more is taken back: a split, a balance or a cut whole, of what is to be cut only the
channels that are missed. Knows losses; how a change is made or taken back it is told.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gaugelasso.axes import AxisTable, Tensors
from gaugelasso.compress.drop import keep_what_batch_needs, temporarily_zeroed


class Guard:
    """Holds one event's loss to `allowance` above what it was before; without a probe, to nothing.

    `loss` is that of the model as it stands, `before` what it was, `undone` what was taken back,
    with the loss that it had led to.
    """

    def __init__(self, model: nn.Module, probe: Callable[[], float] | None, allowance: float):
        self._model, self._probe = model, probe
        self.before = self.loss = before = self._measure() if probe else None
        # A loss that is no number bounds nothing, so nothing is within it.
        self._bound = -math.inf
        if before is not None and math.isfinite(before):
            self._bound = before + allowance
        self.undone: dict[str, float] = {}

    def try_(
        self, what: str, change_: Callable[[], None], remember: Callable[[], Callable[[], None]]
    ) -> bool:
        """Make a change; whether it stays. `remember` is called before it and returns its undo."""
        if self._probe is None:
            change_()
            return True
        undo = remember()
        change_()
        loss = self._measure()
        if loss <= self._bound:
            self.loss = loss
            return True
        undo()
        self.undone[what] = loss
        return False

    def spare(
        self, table: AxisTable, tensors: Tensors, keeps: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The keep-sets, with what the batch would miss (`drop.keep_what_batch_needs`)."""
        if self._probe is None:
            return keeps
        if not math.isfinite(self._bound):
            return {name: torch.ones_like(keep) for name, keep in keeps.items()}
        return keep_what_batch_needs(table, tensors, keeps, self._measure, self._bound)

    def allows(self, table: AxisTable, tensors: Tensors, keeps: dict[str, Tensor]) -> bool:
        """Whether the batch does without all that would go."""
        if self._probe is None:
            return True
        with temporarily_zeroed(table, tensors, keeps):
            return self._measure() <= self._bound

    def _measure(self) -> float:
        """The probe's loss, with the model not keeping statistics of its inputs."""
        assert self._probe is not None
        training = self._model.training
        self._model.eval()
        try:
            return self._probe()
        finally:
            self._model.train(training)
