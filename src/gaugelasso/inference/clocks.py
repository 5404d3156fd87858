"""Seconds of some actions that take turns: by calls on a CPU, by CUDA graphs on a GPU."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from gaugelasso.kernels.cuda_graph import capture_repeated

Name = TypeVar("Name", bound=Hashable)
Actions = Mapping[Name, Callable[[], object]]
# Calls of an action between two readings of the device's clock, in one graph.
CALLS = 5


def call_times(actions: Actions[Name], repeats: int) -> dict[Name, float]:
    """The shortest time of a call of each action, after a call of each that does not count.

    The shortest one, because other programs only add to it.
    """
    times: dict[Name, list[float]] = {name: [] for name in actions}
    for turn in range(repeats + 1):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: min(each) for name, each in times.items()}


def graph_times(actions: Actions[Name], repeats: int) -> dict[Name, float]:
    """As `call_times`, of actions on a GPU that are captured; the device's own clock counts."""
    graphs: dict[Name, torch.cuda.CUDAGraph] = {}
    for name, action in actions.items():
        first = next(iter(graphs.values()), None)
        graphs[name] = capture_repeated(action, CALLS, first)
    times: dict[Name, list[float]] = {name: [] for name in actions}
    for turn in range(repeats + 1):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(start.elapsed_time(end) / 1000 / CALLS)
    return {name: min(each) for name, each in times.items()}


def times_on(device: str, actions: Actions[Name], repeats: int) -> dict[Name, float]:
    """By the clock of this kind of device."""
    return (graph_times if device == "cuda" else call_times)(actions, repeats)


def fastest(times: Mapping[Name, float]) -> tuple[Name, float]:
    """The name of the shortest time, and the time."""
    best = min(times, key=lambda name: times[name])
    return best, times[best]
