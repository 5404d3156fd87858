"""Steps of the baselines as CUDA graphs against plain ones. Needs a GPU."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.baselines.cofi_run import CofiTrainer
from gaugelasso.runs.folder import Existing
from tests.baselines.test_cofi import PLAIN, finish, plan_of, start
from tests.tiny_runs import finished

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = "cuda"
PLAN = replace(plan_of(300, rate=0.3), prune=25)
RESUMED_AT = 23
SINGLE = {"train.precision": "float32"}


def trainer(run: Path, name: str, graph: bool, existing: Existing) -> CofiTrainer:
    changes = {"train.device": DEVICE, "train.graph": str(graph).lower(), "train.fused": "false"}
    return start(run, PLAN, name, existing, SINGLE | changes)


def state(run: CofiTrainer) -> dict[str, Tensor]:
    """All tensors that a step changes, at their addresses."""
    found = {**named_tensors(run.model), **run.compressor.state_tensors()}
    if (masks := run.cofi.masks) is not None:
        found |= {"logits": masks.logits, "multipliers": masks.multipliers}
        for optimizer in (masks._descent, masks._ascent):
            for values in optimizer.state.values():
                found |= {f"{len(found)} {name}": value for name, value in values.items()}
    return found


def masks_of(run: CofiTrainer) -> Tensor:
    assert run.cofi.masks is not None
    return torch.cat([run.cofi.masks.logits.detach(), run.cofi.masks.multipliers.detach()])


@pytest.mark.parametrize("existing", ["refuse", "resume"])
def test_graphed_and_plain_steps_of_cofi_agree(tmp_path: Path, existing: Existing) -> None:
    """Step by step from the same state, with masks and after they are made dense.

    New runs, and runs that were begun on a CPU and are resumed in the middle of the pruning.
    """
    run = finished(tmp_path, **PLAIN)
    if existing == "resume":
        finish(run, PLAN, "whole", kept=(RESUMED_AT,), changes=SINGLE)
        for name in ("plain", "other"):
            shutil.copytree(run.parent / str(RESUMED_AT), run.parent / name)
    plain = trainer(run, "plain", False, existing)
    other = trainer(run, "other", True, existing)
    assert (plain.compressor.steps > 0) == (existing == "resume")
    while plain.compressor.steps < PLAN.steps:
        here, masked = state(plain), plain.compressor.steps < PLAN.dense_at
        with torch.no_grad():
            for name, tensor in state(other).items():
                tensor.copy_(here[name])
        before = None if plain.cofi.masks is None else masks_of(plain)
        for each in (plain, other):
            each._step()
        assert float(other.state.step.loss) == pytest.approx(float(plain.state.step.loss), rel=1e-4)
        assert (plain.cofi.masks is not None) == (other.cofi.masks is not None) == masked
        if masked and before is not None:
            moved, there = masks_of(plain) - before, masks_of(other) - before
            assert moved.norm() > 0
            # A step of Adam is a quotient: rounding decides where a gradient is next to nothing.
            assert (there - moved).norm() <= 1e-2 * moved.norm()
        assert other.compressor.widths == plain.compressor.widths
        for each in (plain, other):
            each.driver.advance()
    assert plain.compressor.fma < plain.compressor.fma_initial
    for each in (plain, other):
        each.folder.close()
