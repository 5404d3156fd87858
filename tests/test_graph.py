"""The graphed step takes the same path as the plain one. Needs a GPU."""

from pathlib import Path

import pytest
import torch

from gaugelasso.trainer import Trainer
from tests.test_config import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def losses(folder: Path, graph: bool) -> list[float]:
    config = tiny(folder, train__device="cuda", train__graph=graph, train__precision="float32")
    trainer = Trainer(config, folder / ("graph" if graph else "plain"))
    seen = []
    for _ in range(30):
        trainer._step()
        seen.append(float(trainer._loss))
    return seen


def test_graph_and_plain_step_agree_through_structural_events(tmp_path: Path) -> None:
    assert losses(tmp_path, graph=True) == pytest.approx(losses(tmp_path, graph=False), rel=1e-3)
