"""What a CUDA graph does to a step, on a CPU: its operators run again without its Python code.

Every operator reads and writes the memory that it had when it was recorded. So a step that depends
on a number of the host, or on a tensor that is replaced, goes wrong here as on a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gaugelasso.kernels.cuda_graph import GraphedStep


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, found))
        return found


class ReplayedStep(GraphedStep):
    """As its base on a GPU: the first call runs plainly, the second one records, others replay."""

    def __init__(self, step: Callable[[], None]):
        super().__init__(step)
        self.replays = 0

    def __call__(self) -> None:
        if not self._warm:
            self._warm = True
            self._step()
        elif not self._valid:
            self._valid, self._recorder = True, _Recorder()
            with self._recorder:
                self._step()
        else:
            self.replays += 1
            self._replay()

    @torch.no_grad()
    def _replay(self) -> None:
        for func, args, kwargs, before in self._recorder.calls:
            found = func(*args, **kwargs)
            # A view, and the result of an operator in place, have the right memory already.
            if all(result.alias_info is None for result in func._schema.returns):
                for old, new in zip(tree_leaves(before), tree_leaves(found), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.detach().copy_(new)
