"""Steps of CoFi and Torch-Pruning as CUDA graphs against plain ones. Needs a GPU.

python -m pytest tests/baselines/test_gpu.py
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.baselines.cofi_run import CofiTrainer
from gaugelasso.baselines.rival import RivalTrainer
from gaugelasso.runs.folder import Existing
from tests.baselines import cofi_runs, torch_pruning_runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = "cuda"
SHORT = replace(cofi_runs.plan_of(300, rate=0.3), prune=25)
RESUMED_AT = 23
SINGLE = {"train.precision": "float32"}


def changes(graph: bool, fused: bool = False) -> dict[str, str]:
    own = {"train.graph": str(graph).lower(), "train.fused": str(fused).lower()}
    return {**SINGLE, "train.device": DEVICE, **own}


def copy_(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Give all tensors of a run the values of another's, at their addresses."""
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])


def state(trainer: RivalTrainer) -> dict[str, Tensor]:
    return {**named_tensors(trainer.model), **trainer.compressor.state_tensors()}


def assert_alike(plain: RivalTrainer, other: RivalTrainer) -> None:
    """After a step of each from the same state: sums on a GPU differ in their last bits."""
    assert float(other.state.step.loss) == pytest.approx(float(plain.state.step.loss), rel=1e-4)
    gradient, here = (each.compressor.optimizer.store.grad for each in (plain, other))
    assert gradient.norm() > 0
    assert (here - gradient).norm() <= 1e-3 * gradient.norm()
    assert other.compressor.widths == plain.compressor.widths


# --- CoFi -----------------------------------------------------------------------------------


def masks_state(trainer: CofiTrainer) -> dict[str, Tensor]:
    masks = trainer.cofi.masks
    if masks is None:
        return {}
    found = {"logits": masks.logits, "multipliers": masks.multipliers}
    for optimizer in (masks._descent, masks._ascent):
        for values in optimizer.state.values():
            found |= {f"{len(found)} {name}": value for name, value in values.items()}
    if (layers := trainer.cofi.step._layers) is not None:
        found |= {f"layers {name}": value for name, value in layers.state().items()}
    return found


def masks_of(trainer: CofiTrainer) -> Tensor:
    masks = trainer.cofi.masks
    assert masks is not None
    return torch.cat([masks.logits.detach(), masks.multipliers.detach()])


@pytest.mark.parametrize(
    ("existing", "fused", "layer_distill"),
    [
        ("refuse", False, 0.0), ("refuse", True, 0.0), ("resume", False, 0.0),
        ("refuse", True, 2.0), ("resume", False, 2.0),
    ],
)  # fmt: skip
def test_graphed_and_plain_steps_of_cofi_agree(
    run: Path, existing: Existing, fused: bool, layer_distill: float
) -> None:
    """Step by step from the same state, with masks and after they are made dense.

    New runs, and runs that were begun on a CPU and are resumed in the middle of the pruning.
    """
    plan = replace(SHORT, layer_distill=layer_distill)
    if existing == "resume":
        cofi_runs.finish(run, plan, "whole", kept=(RESUMED_AT,), changes=SINGLE)
        for name in ("plain", "other"):
            shutil.copytree(run.parent / str(RESUMED_AT), run.parent / name)
    plain = cofi_runs.start(run, plan, "plain", existing, changes(False, fused))
    other = cofi_runs.start(run, plan, "other", existing, changes(True, fused))
    assert (plain.compressor.steps > 0) == (existing == "resume")
    while plain.compressor.steps < plan.steps:
        masked = plain.compressor.steps < plan.dense_at
        copy_(state(plain) | masks_state(plain), state(other) | masks_state(other))
        before = None if plain.cofi.masks is None else masks_of(plain)
        for each in (plain, other):
            each._step()
        assert_alike(plain, other)
        assert (plain.cofi.masks is not None) == (other.cofi.masks is not None) == masked
        if masked and before is not None:
            moved, there = masks_of(plain) - before, masks_of(other) - before
            assert moved.norm() > 0
            # A step of Adam is a quotient: rounding decides where a gradient is next to nothing.
            assert (there - moved).norm() <= 1e-2 * moved.norm()
        for each in (plain, other):
            each.driver.advance()
    assert plain.compressor.fma < plain.compressor.fma_initial
    for each in (plain, other):
        each.folder.close()


# --- Torch-Pruning --------------------------------------------------------------------------


def test_graphed_and_plain_steps_of_torch_pruning_agree(run: Path) -> None:
    """Step by step from the same state, with regularisation and in the rounds."""
    pytest.importorskip("torch_pruning")
    plan = torch_pruning_runs.plan_of(run, "group-norm", reg=0.5)
    plain, other = (
        torch_pruning_runs.start(run, plan, name, changes=changes(graph))
        for name, graph in (("plain", False), ("other", True))
    )
    while plain.compressor.steps < plan.steps:
        copy_(state(plain), state(other))
        for each in (plain, other):
            each._step()
        assert_alike(plain, other)
        for each in (plain, other):
            each.driver.advance()
    assert plain.compressor.fma < plain.compressor.fma_initial
    for each in (plain, other):
        each.folder.close()
