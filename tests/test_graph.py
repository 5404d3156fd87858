"""The graphed step takes the same path as the plain one. Needs a GPU."""

from pathlib import Path

import pytest
import torch

from gaugelasso.axes import named_tensors
from gaugelasso.trainer import Trainer
from tests.test_config import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def trainer(folder: Path, graph: bool) -> Trainer:
    config = tiny(folder, train__device="cuda", train__graph=graph, train__precision="float32")
    return Trainer(config, folder / ("graph" if graph else "plain"))


def state(run: Trainer) -> dict[str, torch.Tensor]:
    return {**named_tensors(run.model), **run.compressor.state_tensors()}


def test_graph_and_plain_step_agree_through_structural_events(tmp_path: Path) -> None:
    """Step by step from the same state: sums on a GPU are not repeatable to the last bit."""
    plain, graphed = trainer(tmp_path, graph=False), trainer(tmp_path, graph=True)
    for _ in range(30):
        with torch.no_grad():
            for name, tensor in state(graphed).items():
                tensor.copy_(state(plain)[name])
        first, second = plain._step(), graphed._step()
        assert float(graphed.step.loss) == pytest.approx(float(plain.step.loss), rel=1e-5)
        assert (first and first.widths) == (second and second.widths)
