"""The step as training runs it on a GPU against the plain one. Needs a GPU."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.config import load_config
from gaugelasso.models import Transformer
from gaugelasso.training.step import TrainingStep
from gaugelasso.training.trainer import Trainer
from tests.tiny import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CONFIG = Path(__file__).parents[2] / "configs" / "retrieval" / "main.toml"
PLAIN = {"train__graph": False, "train__fused": False}
FORMS = {
    "graphed": {"train__graph": True, "train__fused": False},
    "fused": {"train__graph": False, "train__fused": True},
    "graphed and fused": {"train__graph": True, "train__fused": True},
}
# Newton-Schulz reckons in bfloat16; directions are quotients, and rho takes a difference of losses.
ALLOWED = {"matrices": 5e-2, "vectors": 1e-2, "rho": 1e-2}


def trainer(folder: Path, name: str, **changes: object) -> Trainer:
    config = tiny(folder, train__device="cuda", train__precision="float32", **changes)
    return Trainer(config, folder / name)


def state(run: Trainer) -> dict[str, Tensor]:
    return {**named_tensors(run.model), **run.compressor.state_tensors()}


def apart(plain: Trainer, other: Trainer, before: dict[str, Tensor]) -> dict[str, float]:
    """How far a step's results differ in all state, in terms of the plain ones' norm.

    Weights count by the way they went, all matrices as one and all others as one: where a gradient
    is next to nothing, so is what its direction means.
    """
    weights = {name for name, _ in plain.model.named_parameters()}
    here, there = state(plain), state(other)
    kinds: dict[str, list[str]] = {}
    for name in here:
        if name in weights:
            kind = "matrices" if name in plain.compressor.state.table.matrices else "vectors"
        else:
            stem = name.partition(".")[0]
            kind = stem if stem in ("momentum", "second") else name
        kinds.setdefault(kind, []).append(name)
    found = {}
    for kind, names in kinds.items():
        origin = {n: before[n] if n in weights else 0.0 for n in names}
        first, second = (
            torch.cat([(run[n].detach() - origin[n]).double().flatten() for n in names])
            for run in (here, there)
        )
        found[kind] = float((second - first).norm() / first.norm().clamp(min=1e-30))
    return found


def drops(run: Trainer) -> list[tuple[str, tuple[int, ...]]]:
    """Which indices of which axes are to go, as it comes to know them."""
    seen: list[tuple[str, tuple[int, ...]]] = []
    run.compressor.on_drop(lambda drop: seen.append((drop.axis, drop.indices)))
    return seen


@pytest.mark.parametrize("form", FORMS)
def test_forms_agree_through_structural_events(tmp_path: Path, form: str) -> None:
    """Step by step from the same state: sums on a GPU are not repeatable to the last bit."""
    plain, other = trainer(tmp_path, "plain", **PLAIN), trainer(tmp_path, "other", **FORMS[form])
    gone = [drops(run) for run in (plain, other)]
    for _ in range(60):
        before = {name: tensor.detach().clone() for name, tensor in state(plain).items()}
        with torch.no_grad():
            for name, tensor in state(other).items():
                tensor.copy_(before[name])
        first, second = plain._step(), other._step()
        assert float(other.state.step.loss) == pytest.approx(float(plain.state.step.loss), rel=1e-5)
        if not first:
            gradient, here = (run.compressor.optimizer.store.grad for run in (plain, other))
            assert (here - gradient).norm() <= 1e-4 * gradient.norm()
            for kind, distance in apart(plain, other, before).items():
                assert distance <= ALLOWED.get(kind, 1e-3), (kind, distance)
        assert (first and first.widths) == (second and second.widths)
        assert gone[0] == gone[1]
    assert gone[0]
    assert plain.compressor.fma < plain.compressor.fma_initial


def test_a_replayed_balance_knows_whether_there_is_pressure(tmp_path: Path) -> None:
    """Runs reference_kernels, is captured, then replayed: levels fall under pressure alone."""
    other = trainer(tmp_path, "other", train__graph=True)
    plain = trainer(tmp_path, "plain", train__graph=False)
    plain._step()
    for pressing in (False, True, False, True, True, False):
        with torch.no_grad():
            for tensor, here in zip(state(other).values(), state(plain).values(), strict=True):
                tensor.copy_(here)
        before = levels(plain)
        for run in (plain, other):
            run.compressor.state.balance_(pressing)
        after = levels(plain)
        assert torch.allclose(levels(other), after, rtol=1e-4)
        assert bool((after < 0.3 * before if pressing else after > 0.99 * before).all())


def levels(run: Trainer) -> Tensor:
    tensors = named_tensors(run.model)
    norms = run.compressor.state.table.norms
    return torch.stack([(tensors[n.weight] * tensors[n.energy]).sum() for n in norms])


def test_batches_made_ahead_are_those_of_their_steps(tmp_path: Path) -> None:
    step = trainer(tmp_path, "run").state.step
    for number in (0, 1, 2, 5, 6, 3):
        step.load_(number)
        inputs, targets = step._batches(number)
        assert torch.equal(step.inputs, inputs)
        assert torch.equal(step.targets, targets)


def test_memory_falls_with_the_structure() -> None:
    """Three quarters of all filters and values die, go, and leave nothing behind."""
    config = load_config(CONFIG)
    model = Transformer(config.model.spec(config.task), config.train.seed).to("cuda")
    step = TrainingStep(model, config, "cuda")
    first, parameters = held(step), step.compressor.parameters
    kill_inner_(step)
    step.compressor.event_()
    assert step.compressor.parameters < 0.8 * parameters  # else memory is kept for reuse
    second = held(step)
    assert second[0] < first[0]
    assert second[1] < first[1]


def held(step: TrainingStep) -> tuple[int, int]:
    """Bytes in use and bytes reserved between two steps."""
    for number in range(4):
        step.load_(number)
        step()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@torch.no_grad()
def kill_inner_(step: TrainingStep) -> None:
    tensors = named_tensors(step.model)
    for axis in step.compressor.state.table.axes:
        for slot in axis.side_a + axis.side_b if axis.kind in ("d_v", "d_f") else ():
            dead = tensors[slot.tensor]
            dead.narrow(slot.dim, 0, 3 * dead.shape[slot.dim] // 4).zero_()


def test_bfloat16_curve_is_that_of_the_plain_path() -> None:
    """200 steps at full size, each path on its own, apart as far as rounding takes two plain ones.

    The second plain one starts from weights that are rounded to bfloat16.
    """
    curves = []
    for form, rounded in ((PLAIN, False), (PLAIN, True), (FORMS["graphed and fused"], False)):
        changes = {key.replace("__", "."): json.dumps(value) for key, value in form.items()}
        config = load_config(CONFIG, changes)
        model = Transformer(config.model.spec(config.task), config.train.seed).to("cuda")
        if rounded:
            model.load_state_dict({k: round_off(v) for k, v in model.state_dict().items()})
        step = TrainingStep(model, config, "cuda")
        losses = []
        for number in range(200):
            step.load_(number)
            step()
            losses.append(step.loss.clone())
        curves.append(torch.stack(losses).cpu())
    noise, apart = ((curve - curves[0]).abs().mean() for curve in curves[1:])
    assert curves[0][-20:].mean() < curves[0][:20].mean() - 0.5
    assert apart <= 3 * noise, (float(noise), float(apart))


def round_off(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else tensor
