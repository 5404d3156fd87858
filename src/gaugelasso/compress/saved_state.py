"""A state of a model in training, kept in memory: to return to it, also from a smaller structure.

Knows nothing of files; `runs.checkpoint` is the form on disk.
"""

import torch
from torch import Tensor, nn

from gaugelasso.axes import named_tensors
from gaugelasso.compress import surgery
from gaugelasso.compress.flat import replace_tensor, tensor_places
from gaugelasso.compress.model_state import ModelState
from gaugelasso.compress.resume_state import ResumeState


class SavedState:
    """The present structure, weights and optimizer state. Values are copied to the CPU."""

    def __init__(self, state: ModelState, resume_state: ResumeState):
        self._restore = surgery.snapshot_modules(state.model)
        self._tensors = {name: _kept(t) for name, t in named_tensors(state.model).items()}
        self._vectors = [_kept(vector.values) for vector in state.optimizer.state]
        self._training = {name: _kept(t) for name, t in resume_state.tensors().items()}
        self.fma = state.fma

    @torch.no_grad()
    def load_(self, state: ModelState, resume_state: ResumeState) -> None:
        """Put the state back; it can be loaded any number of times."""
        model, device = state.model, state.plan.store.weight.device
        self._restore()
        places = tensor_places(model)
        for name, tensor in named_tensors(model).items():
            value = self._tensors[name].to(device, copy=True)
            trained = isinstance(tensor, nn.Parameter)
            replace_tensor(places, name, nn.Parameter(value) if trained else value)
        for vector, values in zip(state.optimizer.state, self._vectors, strict=True):
            vector.values = values.to(device, copy=True)
        state.rebuild_()
        here = resume_state.tensors()
        resume_state.load_({name: self._training[name].to(here[name].device) for name in here})


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
