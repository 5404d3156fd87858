"""Graphs on one stream keep the workspaces whose addresses they have.

On a CPU with a model of what PyTorch 2.12 and 2.13 do; on a GPU as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from gaugelasso.kernels import cuda_graph
from gaugelasso.kernels.cuda_graph import GraphedStep, capture_repeated


class Workspace:
    """Memory of a graph, which lasts, or of none: then it is gone once it is freed."""

    def __init__(self, owner: "Graph | None"):
        self.owner, self.gone = owner, False


class Graph:
    """A graph that, when it goes, frees the workspace that the stream has."""

    capturing: "Graph | None" = None
    workspace: Workspace | None = None

    def __init__(self) -> None:
        self.used: list[Workspace] = []
        self.captured = False

    def capture_begin(self, *_: Any, **named: Any) -> None:
        assert Graph.capturing is None
        Graph.capturing = self

    def capture_end(self) -> None:
        Graph.capturing, self.captured = None, True

    def pool(self) -> "Graph":
        return self

    def replay(self) -> None:
        assert not any(each.gone for each in self.used), "an illegal memory access"

    def __del__(self) -> None:
        if self.captured and Graph.workspace is not None:
            Graph.workspace.gone = Graph.workspace.owner is None
            Graph.workspace = None


def multiply() -> None:
    """A product of cuBLAS: takes a workspace where the stream has none."""
    if Graph.workspace is None:
        Graph.workspace = Workspace(Graph.capturing)
    if Graph.capturing is not None:
        Graph.capturing.used.append(Graph.workspace)


class Stream:
    def wait_stream(self, other: object) -> None:
        pass


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    @contextmanager
    def captured(graph: Graph, *_: Any, **named: Any) -> Iterator[None]:
        graph.capture_begin()
        yield
        graph.capture_end()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", captured)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda_graph, "_stream", Stream)
    monkeypatch.setattr(cuda_graph, "_mark", lambda: torch.zeros(()))
    monkeypatch.setattr(cuda_graph, "_frees_workspaces", lambda: True)
    yield
    Graph.workspace = None


def captured_step(action: Callable[[], None]) -> GraphedStep:
    step = GraphedStep(action)
    for _ in range(3):  # directly, captured, replayed
        step()
    return step


@pytest.mark.usefixtures("modelled")
def test_a_graph_outlives_others_of_its_stream() -> None:
    first, second = captured_step(multiply), captured_step(multiply)
    second.reset(release=True)
    first()
    capture_repeated(multiply, 2)
    first()


@pytest.mark.usefixtures("modelled")
def test_a_graph_outlives_the_one_that_it_replaces() -> None:
    step = captured_step(multiply)
    step.reset()
    for _ in range(3):
        step()


@pytest.mark.usefixtures("modelled")
def test_a_measured_graph_outlives_others() -> None:
    graph = capture_repeated(multiply, 2)
    captured_step(multiply).reset(release=True)
    graph.replay()


@pytest.mark.usefixtures("modelled")
def test_an_older_pytorch_captures_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "_frees_workspaces", lambda: False)
    begun: list[Graph] = []
    monkeypatch.setattr(Graph, "capture_begin", lambda self, *_, **named: begun.append(self))
    graph, step = capture_repeated(multiply, 2), captured_step(multiply)
    assert begun == [graph, step._graph]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.inference_mode()
def test_products_outlive_other_graphs() -> None:
    """Few rows and many inputs: such a product is split, and its parts need a workspace."""
    wide, deep = (torch.randn(64, 2**16, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)

    def product() -> None:
        torch.mm(wide, deep.T, out=out)

    first, second = captured_step(product), captured_step(product)
    expected = out.clone()
    second.reset(release=True)
    torch.cuda.empty_cache()
    taken = torch.zeros(2**26, device="cuda")  # where the workspace may have been
    for _ in range(3):
        out.zero_()
        first()
        assert torch.equal(out, expected)
    assert not taken.any()
