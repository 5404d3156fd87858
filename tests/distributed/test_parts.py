"""What ranks are made of, in one process: the tree, the fingerprint, the variables."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from gaugelasso import distributed
from gaugelasso.compress.step_means import pairwise_sum
from gaugelasso.distributed import ALONE, Ranks, Team, fingerprint, started_as
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from gaugelasso.training.step import TrainingStep
from tests.tiny import tiny


class Block(Team):
    """One of several ranks whose rows are all known here."""

    def __init__(self, rank: int, size: int, rows: Tensor):
        self.rank, self.size, self._all = rank, size, rows

    def mine(self) -> Tensor:
        return self._all.chunk(self.size)[self.rank]

    def gather(self, tensor: Tensor) -> Tensor:
        """What the others come to by themselves is what this rank would in their place."""
        parts = []
        for rows in self._all.chunk(self.size):
            while len(rows) > len(tensor):
                rows = rows[0::2] + rows[1::2]
            parts.append(rows)
        return torch.cat(parts)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6, 8, 12, 24])
def test_the_tree_knows_of_no_ranks(number: int) -> None:
    rows = torch.randn(number, 50, generator=torch.Generator().manual_seed(number))
    alone = pairwise_sum(rows, ALONE)
    assert torch.allclose(alone, rows.sum(0), atol=1e-5)
    for size in range(1, number + 1):
        if number % size == 0:
            team = Block(size - 1, size, rows)
            assert torch.equal(pairwise_sum(team.mine(), team), alone), size


@pytest.mark.parametrize("canonical", [False, True])
def test_energies_are_means_over_micro_batches(tmp_path: Path, canonical: bool) -> None:
    def first_energy(**changes: Any) -> tuple[TrainingStep, Tensor]:
        config = tiny(tmp_path, **changes)
        step = TrainingStep(Transformer(config.model.spec(config.task), 3), config, "cpu")
        step.load_(0)
        return step, step.model.classifier.read.energy

    step, energy = first_energy(train__accumulate=3, train__canonical=canonical)
    means = []
    for inputs, targets in zip(step.inputs, step.targets, strict=True):
        alone, mine = first_energy()
        alone.forward(inputs, targets)
        means.append(mine.clone())
    step()
    assert torch.allclose(energy, torch.stack(means).mean(0))
    assert not torch.allclose(energy, means[-1])


def test_a_fingerprint_sees_every_bit_name_and_shape() -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "empty": torch.zeros(0, 2)}
    print_ = fingerprint(tensors, "more")
    assert print_ == fingerprint({k: v.clone() for k, v in reversed(tensors.items())}, "more")
    others = [
        {**tensors, "a": tensors["a"].clone()},
        {**tensors, "a": tensors["a"].view(4, 3)},
        {**tensors, "b": tensors["b"].flip(0)},
        {"c" if name == "a" else name: tensor for name, tensor in tensors.items()},
    ]
    others[0]["a"][1, 2] = torch.nextafter(others[0]["a"][1, 2], torch.tensor(9.0))
    seen = {print_, fingerprint(tensors, "else"), *(fingerprint(other, "more") for other in others)}
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [("2", "2", "must be below WORLD_SIZE=2"), ("x", "2", "RANK='x'"), ("0", "-1", "WORLD_SIZE")],
)
def test_variables_that_are_not_torchruns(
    monkeypatch: pytest.MonkeyPatch, rank: str, size: str, message: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UserError, match=message):
        started_as()


def test_a_stop_request_reaches_every_rank_with_the_next_exchange(tmp_path: Path) -> None:
    """Three ranks, of which this one raises no flag; the mean over all is 1/3."""

    class Notified(Ranks):
        def __init__(self) -> None:
            self.rank, self.size, self.raised = 0, 3, 0.0
            self._stop = torch.zeros(())

        def mean_(self, tensor: Tensor) -> None:
            tensor[-1] += (self.raised - tensor[-1]) / self.size

    team = Notified()
    config = tiny(tmp_path, train__accumulate=3)
    step = TrainingStep(Transformer(config.model.spec(config.task), 3), config, "cpu", team)
    for raised in (0.0, 1.0):
        team.raised = raised
        step.load_(0)
        step()
        assert team.stop_requested == bool(raised)
    # The flag outlives the compressor, as after a rollback.
    again = TrainingStep(Transformer(config.model.spec(config.task), 3), config, "cpu", team)
    assert team.stop_flag(again.compressor.optimizer.store.weight.device) is team._stop
    assert team.stop_requested


def test_a_request_is_a_flag_of_the_team_alone() -> None:
    team = object.__new__(Ranks)
    team._stop = torch.zeros(())
    team.request_stop()
    assert team.stop_requested
    team.clear_stop()
    assert not team.stop_requested
    # One process has no other rank to notify, and its team serves all its runs.
    ALONE.request_stop()
    assert not ALONE.stop_requested
    assert not ALONE.stop_flag(torch.device("cpu"))


def test_a_roll_call_goes_on_while_ranks_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late: on a machine that does much else they take turns."""
    team, now = object.__new__(Ranks), 0.0
    team.rank, team.size, team._store = 0, 5, HashStore()
    answers = {
        rank: 0.9 * distributed._ROLL_CALL_S * turn for rank, turn in enumerate((1, 2, 3, 99, 1))
    }

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        for rank, at in answers.items():
            if now >= at:
                team._store.set(f"here/{rank}", "")

    monkeypatch.setattr(distributed, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert team._roll_call() == "rank 3 is gone"
    assert now < answers[2] + 2 * distributed._ROLL_CALL_S
