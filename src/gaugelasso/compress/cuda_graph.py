"""Device work as a CUDA graph: thousands of launches become one.

Captured anew when the tensors change; the first call runs plainly, so that libraries set
themselves up outside the capture.
"""

from collections.abc import Callable
from functools import cache

import torch


@cache
def _stream() -> torch.cuda.Stream:
    """One stream for all captures: libraries keep workspace for every stream they meet."""
    return torch.cuda.Stream()


class GraphedStep:
    """Runs `step` (device work only, on fixed tensors) plainly, then as a graph.

    With `on` false it always runs plainly.
    """

    def __init__(self, step: Callable[[], None], on: bool = True):
        self._step, self._on = step, on
        self._graph: torch.cuda.CUDAGraph | None = None
        self.reset()

    def reset(self, release: bool = False) -> None:
        """The tensors have changed: the capture is void.

        Its memory serves the next one, or with `release` goes back to the allocator.
        """
        self._valid = self._warm = False
        if release:
            self._graph = None

    def __call__(self) -> None:
        if not self._on:
            self._step()
            return
        if not self._warm:
            self._warm = True
            # On the stream that captures: what autograd allocates stays valid there.
            stream = _stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step()
            torch.cuda.current_stream().wait_stream(stream)
            return
        if self._graph is None or not self._valid:
            pool = self._graph.pool() if self._graph else None
            graph = torch.cuda.CUDAGraph()
            # Other threads (a loader that pins memory) may go on meanwhile.
            with torch.cuda.graph(graph, pool, _stream(), capture_error_mode="thread_local"):
                self._step()
            self._graph, self._valid = graph, True
        self._graph.replay()
