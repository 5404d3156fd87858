"""Rivals whose steps fail go back to a checkpoint, with all that belongs to its structure."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.baselines.cofi import CofiPlan
from gaugelasso.baselines.post_hoc import PrunePlan
from gaugelasso.baselines.pruning import PruneTrainer, prune_settings
from gaugelasso.baselines.rival import RivalTrainer
from gaugelasso.baselines.source import Source
from gaugelasso.compress.result import TargetMissed
from tests.baselines import cofi_runs
from tests.tiny_runs import read, rows
from tests.training.spoilers import poison, returns

ROUNDS = 6
COFI = CofiPlan("fma", 300, warmup=4, prune=20, finetune=14, distill=0.5, mask_rate=0.1)
CHANGES = {"train.skip_limit": "3", "train.log_every": "2", "train.checkpoint_every": "8"}


def finish(trainer: RivalTrainer) -> dict[str, Any]:
    with contextlib.suppress(TargetMissed):
        trainer.run()
    return read(trainer.folder.path / "summary.json")


def pruning(run: Path, name: str) -> PruneTrainer:
    source = Source.of(run)
    fma = 0.4 * read(run / "summary.json")["fma_final"]
    plan = PrunePlan(None, fma, rounds=ROUNDS, channels=1, corrective=4, finetune=12)
    return PruneTrainer(source, plan, prune_settings(source, plan, CHANGES), run.parent / name)


def fail_after(monkeypatch: pytest.MonkeyPatch, trainer: RivalTrainer, step: int) -> None:
    """The four batches after this step have no loss."""
    begin = trainer.first_batch + step
    poison(monkeypatch, range(begin, begin + 4))


def cuts(folder: Path) -> list[int]:
    """The steps of the cuts that stand."""
    found = list[int]()
    for event in rows(folder, "events.jsonl"):
        back = event["returned_to"]
        found = [*found, event["step"]] if back is None else [s for s in found if s < back]
    return found


@pytest.mark.parametrize("round_", [3, ROUNDS])
def test_rounds_that_were_undone_are_made_again(
    round_: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = pruning(run, f"failing-{round_}")
    fail_after(monkeypatch, trainer, 4 * (round_ - 1))
    summary = finish(trainer)
    assert len(returns(trainer.folder.path)) == 1
    assert summary["held"]
    assert summary["pruning"]["rounds_made"] == len(cuts(trainer.folder.path)) == ROUNDS
    work = [e["fma_before"] - e["fma"] for e in rows(trainer.folder.path, "events.jsonl")]
    assert max(work) < 0.3 * summary["fma_initial"]  # none does the work of several


def test_masks_made_dense_are_so_again_after_a_return(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = finish(cofi_runs.start(run, COFI, "honest", changes=CHANGES))
    failing = cofi_runs.start(run, COFI, "failing", changes=CHANGES)
    fail_after(monkeypatch, failing, COFI.dense_at)
    summary = finish(failing)
    (back,) = returns(failing.folder.path)
    assert back[1] == COFI.dense_at
    assert summary["fma_final"] == honest["fma_final"] < honest["fma_initial"]
    assert summary["cofi"] == honest["cofi"]  # the masks, and what was seen of their control
    # The fine-tuning has all of its steps.
    assert summary["steps"] == back[0] + COFI.finetune
