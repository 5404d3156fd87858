"""The step as training runs it on a GPU against the plain one. Needs a GPU."""

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

PLAIN = {"train__graph": False, "train__fused": False}
FORMS = {
    "graphed": {"train__graph": True, "train__fused": False},
    "fused": {"train__graph": False, "train__fused": True},
    "graphed and fused": {"train__graph": True, "train__fused": True},
}


def trainer(folder: Path, name: str, precision: str = "float32", **changes: object) -> Trainer:
    config = tiny(folder, train__device="cuda", train__precision=precision, **changes)
    return Trainer(config, folder / name)


def state(run: Trainer) -> dict[str, torch.Tensor]:
    return {**named_tensors(run.model), **run.compressor.state_tensors()}


@pytest.mark.parametrize("form", FORMS)
def test_forms_agree_through_structural_events(tmp_path: Path, form: str) -> None:
    """Step by step from the same state: sums on a GPU are not repeatable to the last bit."""
    plain, other = trainer(tmp_path, "plain", **PLAIN), trainer(tmp_path, "other", **FORMS[form])
    for _ in range(60):
        with torch.no_grad():
            for name, tensor in state(other).items():
                tensor.copy_(state(plain)[name])
        first, second = plain._step(), other._step()
        assert float(other.step.loss) == pytest.approx(float(plain.step.loss), rel=1e-5)
        if not first:
            gradient, here = (run.compressor.optimizer.store.grad for run in (plain, other))
            assert (here - gradient).norm() <= 1e-4 * gradient.norm()
        assert (first and first.widths) == (second and second.widths)
    assert plain.compressor.fma < plain.compressor.fma_initial


def test_bfloat16_curve_is_that_of_the_plain_path(tmp_path: Path) -> None:
    """200 steps without cuts, each path on its own: apart by no more than two plain runs are."""
    curves = []
    for number, form in enumerate([PLAIN, PLAIN, FORMS["graphed and fused"]]):
        run = trainer(
            tmp_path, str(number), "bfloat16", target__loss=1e-9, train__steps=400, **form
        )
        losses = []
        for _ in range(200):
            run._step()
            losses.append(float(run.step.loss))
        curves.append(torch.tensor(losses))
    noise, apart = ((curve - curves[0]).abs().mean() for curve in curves[1:])
    assert apart <= max(3 * float(noise), 0.02 * float(curves[0].mean())), (noise, apart)
