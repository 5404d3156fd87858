"""The inference form of a trained transformer: what serving needs, and nothing else.

Gains and scales are folded into the maps, the sites are reordered so that reads are nearly
contiguous, and all tensors are buffers of one precision. Plain PyTorch.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from gaugelasso.inference.arrays import ArrayStep, supported
from gaugelasso.inference.cache import Cache, NewTokens
from gaugelasso.inference.checks import unknown_token
from gaugelasso.inference.graphs import Captured
from gaugelasso.inference.passes import PassModel
from gaugelasso.models import SpecError


class InferenceModel(PassModel):
    """Build with `InferenceModel(model)`; call on [B, S] tokens or [B, S, n] patches.

    `forms` says how each operator reads, writes and attends, by its name or for all;
    `tuned` measures which are fastest. With `int8` the maps are stored in eight bits, a quarter of
    the memory; `compare` says what that costs. Widths are padded to multiples of `align` (default:
    1 on a CPU, 16 on a GPU), and the stream lies token by token or site by site (`stream`). The
    trained model is not changed.
    """

    # Seconds by operator, part and form, where `tuned` has measured them.
    timings: Mapping[str, Mapping[str, Mapping[str, float]]] = MappingProxyType({})
    _captured: Captured | None = None
    _arrays: ArrayStep | None = None

    def captured(self) -> Captured:
        """This model with its work on a GPU captured in CUDA graphs, which are kept."""
        if self._captured is None or self._captured.device != self.device:
            self._captured = Captured(self)
        return self._captured

    @property
    def steps_by_numpy(self) -> bool:
        """Whether NumPy computes the steps of one sequence."""
        return self._arrays is not None

    def step_by_numpy_(self, on: bool = True) -> bool:
        """Let NumPy compute the steps of one sequence, if the model is `supported`.

        Until its tensors are moved or converted. Returns whether it does.
        """
        self._arrays = ArrayStep(self) if on and supported(self) else None
        return self.steps_by_numpy

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_arrays": None}  # a copy has memory of its own

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> "InferenceModel":
        self._arrays = None  # it has the memory of these tensors
        super()._apply(fn, recurse)
        return self

    def _step(self, tokens: Tensor, cache: Cache, at: NewTokens) -> Tensor:
        if self._arrays is None or at.equal is None or cache.batch > 1:
            return super()._step(tokens, cache, at)
        token = int(tokens)
        if not 0 <= token < self.spec.inputs:  # NumPy counts numbers below 0 from the end
            raise SpecError(unknown_token(self.spec, token))
        return torch.from_numpy(self._arrays(token, cache.arrays, at.equal))[None]
