"""Measures the latency of the models of a baseline in one forward pass, taken in turns."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gaugelasso.bench.inference import bench_inference
from gaugelasso.config import Config
from gaugelasso.runs.checkpoint import load_model


def latencies(
    folders: Mapping[str, Path], config: Config, device: str, repeats: int
) -> dict[str, dict[str, Any]]:
    """Return, by name, median and quartiles in ms for one sequence; a CPU uses one thread."""
    models = {name: load_model(folder) for name, folder in folders.items()}
    with _one_thread():
        rows = bench_inference(models, config, device, repeats)
    return {
        name: {
            "latency_ms": row["latency_ms"],
            "latency_quartiles": row["quartiles"]["latency_ms"],
        }
        for name, row in rows.items()
    }


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
