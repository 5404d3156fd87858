"""Ranks on GPUs: the exchange inside a captured step. Needs a GPU, or two."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

from gaugelasso.axes import named_tensors
from gaugelasso.distributed import Ranks
from gaugelasso.models import Transformer
from gaugelasso.training.step import TrainingStep
from tests.distributed.crews import CANONICAL, SETTINGS, Crews
from tests.tiny import tiny
from tests.tiny_runs import outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Twin(Ranks):
    """One of two that do the same, of which only one is there: real exchanges on one GPU."""

    def __init__(self) -> None:
        super().__init__(gpu=True, timeout_s=20)
        self.size = 2

    def sum_(self, tensor: Tensor) -> None:
        super().sum_(tensor)
        tensor.mul_(2)

    def gather(self, tensor: Tensor) -> Tensor:
        mine = torch.empty_like(tensor)
        dist.all_gather([mine], tensor.contiguous())
        return torch.cat([mine, mine])


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Twin]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    settings |= {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in settings.items():
        monkeypatch.setitem(os.environ, name, str(value))
    torch.cuda.set_device(0)
    twin = Twin()
    yield twin
    twin.close()


@pytest.mark.parametrize("canonical", [False, True])
def test_an_exchange_is_captured_with_the_step(tmp_path: Path, twin: Twin, canonical: bool) -> None:
    """Step by step from the same state, as in test_graph."""
    steps = []
    for graph in (False, True):
        config = tiny(
            tmp_path,
            train__device="cuda",
            train__precision="float32",
            train__graph=graph,
            train__accumulate=4,
            train__canonical=canonical,
        )
        model = Transformer(config.model.spec(config.task), 3).to("cuda")
        steps.append(TrainingStep(model, config, "cuda:0", twin))
    plain, other = steps
    for number in range(30):
        with torch.no_grad():
            for mine, theirs in ((_state(other), _state(plain)),):
                for name, tensor in mine.items():
                    tensor.copy_(theirs[name])
        for step in steps:
            step.load_(number)
            step()
        assert float(other.loss) == pytest.approx(float(plain.loss), rel=1e-5)
        first, second = (step.compressor.finish_step_() for step in steps)
        assert (first and first.widths) == (second and second.widths)
    assert other._step._graph is not None


def _state(step: TrainingStep) -> dict[str, Tensor]:
    return {**named_tensors(step.model), **step.compressor.state_tensors()}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("settings", [SETTINGS, CANONICAL])
def test_two_gpus_stay_in_the_same_state(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Every event compares all bits of the two: a run that ends has passed them all."""
    crews = Crews(tmp_path, (*settings, "train.device=cuda"))
    run = crews.finish("two", 2)
    assert outcome(run)["fma_final"] < outcome(run)["fma_initial"]
