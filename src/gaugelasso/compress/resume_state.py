"""What a checkpoint holds beside the model, and whether it is sound and the same on all ranks.

Reads and writes tensors by name. Knows nothing of files.
"""

import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.step_scalars import StepScalars
from gaugelasso.distributed import fingerprint
from gaugelasso.errors import UserError


class ResumeState:
    """The state of scalars and optimizer that the next step depends on."""

    def __init__(self, state: ModelState, scalars: StepScalars):
        self._state, self._scalars = state, scalars

    def _all_scalars(self) -> dict[str, Tensor]:
        return {**self._scalars.state(), **self._state.optimizer.scalars()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything beside the model that the next step depends on, by name."""
        tensors = self._all_scalars()
        if self._state.births is not None:
            tensors |= self._state.births.tensors()
        if self._state.harm is not None:
            tensors |= self._state.harm.tensors()
        for kind, views in self._state.optimizer.states().items():
            tensors |= {f"{kind}.{name}": view for name, view in views.items()}
        return tensors

    @torch.no_grad()
    def load_(self, tensors: dict[str, Tensor]) -> None:
        """Load saved tensors; the model must already have the structure they were saved with."""
        here = self.tensors()
        if here.keys() != tensors.keys():
            differing = sorted(here.keys() ^ tensors.keys())
            names = ", ".join(differing[:5])
            raise UserError(f"optimizer state does not fit the model: {names}")
        for name, tensor in here.items():
            if tensor.shape != tensors[name].shape:
                raise UserError(f"optimizer state {name!r} does not fit the model's shape")
            tensor.copy_(tensors[name])
        self._scalars.forget_last_set_()

    def forget_energies_(self) -> None:
        """Zero the NaN and infinite energies of a skipped step; the next step writes them again."""
        tensors = named_tensors(self._state.model)
        for norm in self._state.table.norms:
            tensors[norm.energy].nan_to_num_(0.0, 0.0, 0.0)

    def finite(self) -> bool:
        """Whether everything that the next step depends on is finite."""
        # All parameters are views of the flat weight.
        tensors = [self._state.plan.store.weight, *self._state.model.buffers()]
        tensors += self._all_scalars().values()
        tensors += [] if self._state.harm is None else self._state.harm.tensors().values()
        tensors += [vector.values for vector in self._state.optimizer.state]
        floating = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
        return bool(torch.stack([tensor.isfinite().all() for tensor in floating]).all())

    def check_same(self, steps: int, when: str) -> None:
        """RanksDiffer unless all ranks hold the same state; `when` is the point of the run."""
        team, model = self._state.team, self._state.model
        if team.size > 1:
            tensors = {**named_tensors(model), **self.tensors()}
            team.check_same(fingerprint(tensors, steps, model.structure()), when)
