"""Device work as a CUDA graph: thousands of launches become one.

A graph is captured again when the tensors change. The first call runs eagerly, so that libraries
initialise outside the capture.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


@cache
def _stream() -> torch.cuda.Stream:
    """One stream for all captures: libraries keep a workspace for every stream."""
    return torch.cuda.Stream()


@cache
def _frees_workspaces() -> bool:
    """Whether this PyTorch frees the workspaces of a stream with any graph of it: since 2.12."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)


@cache
def _mark() -> Tensor:
    return torch.zeros((), device="cuda")


def _forget_workspaces() -> None:
    """Capture and drop a graph: the libraries take another workspace on the stream then."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(_stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            _mark().zero_()  # PyTorch warns of an empty graph
        finally:
            graph.capture_end()


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Around a capture: the workspaces that cuBLAS takes are memory of the graph itself.

    PyTorch 2.12 and 2.13 free the workspaces of a stream with any graph that was captured there,
    also those that other graphs have the address of (pytorch/pytorch#193402). Replaying these is
    an illegal access, or overwrites what took the memory. Older ones need nothing.
    """
    if not _frees_workspaces():
        yield
        return
    _mark()  # made outside of the capture
    _forget_workspaces()
    try:
        yield
    finally:
        _forget_workspaces()


class GraphedStep:
    """Runs `step` (device work only, on fixed tensors) eagerly once, then as a CUDA graph.

    With `on` false it always runs eagerly.
    """

    def __init__(self, step: Callable[[], None], on: bool = True):
        self._step, self._on = step, on
        self._graph: torch.cuda.CUDAGraph | None = None
        self.reset()

    def reset(self, release: bool = False) -> None:
        """Drop the capture, because the tensors have changed.

        The next capture uses its memory; with `release` the memory goes back to the allocator.
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
            # On the capture's own stream, so that autograd's allocations stay valid there.
            stream = _stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step()
            torch.cuda.current_stream().wait_stream(stream)
            return
        if self._graph is None or not self._valid:
            pool = self._graph.pool() if self._graph else None
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as a loader that pins memory, may use CUDA during the capture.
            with (
                _own_workspaces(),
                torch.cuda.graph(graph, pool, _stream(), capture_error_mode="thread_local"),
            ):
                self._step()
            self._graph, self._valid = graph, True
        self._graph.replay()


def capture_repeated(
    action: Callable[[], object], times: int, memory_of: torch.cuda.CUDAGraph | None = None
) -> torch.cuda.CUDAGraph:
    """A graph of several calls of an action, for a measurement.

    With `memory_of` it shares the memory of that graph, whose results nobody reads.
    `torch.cuda.graph` also collects garbage and empties the allocator's cache, which takes longer
    than hundreds of short measurements.
    """
    stream, graph = _stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        action()  # libraries initialise outside the capture
        torch.cuda.synchronize()
        pool = None if memory_of is None else memory_of.pool()
        with _own_workspaces():
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                for _ in range(times):
                    action()
            finally:
                graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
