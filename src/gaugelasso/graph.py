"""Device work as a CUDA graph: thousands of launches become one.

Captured anew when the tensors change; the first calls run plainly, so that libraries set
themselves up outside the capture.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def _pool() -> Any:
    """One memory for all graphs: they run one after another and leave nothing behind in it."""
    return torch.cuda.graph_pool_handle()


@cache
def _stream() -> torch.cuda.Stream:
    """One stream for all captures: libraries keep workspace for every stream they meet."""
    return torch.cuda.Stream()


class GraphedStep:
    """Runs `step` (device work only, on fixed tensors) plainly, then as a graph."""

    def __init__(self, step: Callable[[], None], warmup: int = 1):
        self._step = step
        self._warmup = warmup
        self._stream = _stream()
        self.reset()

    def reset(self) -> None:
        """The tensors have changed: forget the capture."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._left = self._warmup

    def __call__(self) -> None:
        if self._graph is None and self._left > 0:
            self._left -= 1
            # On the stream that captures: what autograd allocates stays valid there.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._step()
            torch.cuda.current_stream().wait_stream(self._stream)
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            # Other threads (a loader that pins memory) may go on meanwhile.
            with torch.cuda.graph(
                self._graph, _pool(), self._stream, capture_error_mode="thread_local"
            ):
                self._step()
        self._graph.replay()
