"""Distillation from the original, and what a config with pretrained weights means."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gaugelasso import kernels
from gaugelasso.bench.measure import _step as measured_step
from gaugelasso.bench.measure import work_per_token
from gaugelasso.compress.defaults import MOST_PRETRAINED_LR
from gaugelasso.config import Config
from gaugelasso.config.auto import DISTILL
from gaugelasso.errors import UserError
from gaugelasso.training.distillation import distillation_of
from gaugelasso.training.step import TrainingStep
from gaugelasso.training.trainer import Trainer
from tests.tiny import tiny
from tests.training.pretrained.configs import COURSE, MODEL, config


@pytest.fixture(autouse=True)
def _config_of_a_course(place: Path) -> None:
    (place / "run.toml").write_text(MODEL + COURSE)


def step_of(config: Config) -> TrainingStep:
    step = TrainingStep(config.model.build(config.task, 0), config, "cpu")
    step.load_(0)
    return step


def gradient(step: TrainingStep) -> torch.Tensor:
    step.gradients()
    store = step.compressor.state.plan.store
    store.collect_grads_()
    return store.grad.clone()


def test_pretrained_weights_go_by_harm_and_are_distilled() -> None:
    found = config()
    assert found.compress.removal == "harm"
    assert found.train.distill == DISTILL
    given = config(compress__removal="pressure", train__distill=0.0)
    assert (given.compress.removal, given.train.distill) == ("pressure", 0.0)
    pressed = config(
        target__hold="pressed", target__loss=5.0, target__fma=0.0,
        train__warmup=2, train__cooldown=4,
    )  # fmt: skip
    assert (pressed.compress.removal, pressed.train.distill) == ("pressure", 0.0)
    assert found.compress.lr == MOST_PRETRAINED_LR


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_out_of_bounds_is_refused(share: float) -> None:
    with pytest.raises(UserError, match=rf"train\.distill = {share}: must be in \[0, 1\]"):
        config(train__distill=share)


def test_the_gradient_is_a_mixture_and_the_loss_is_that_of_the_text() -> None:
    """For the original itself the distance is at its least, so that it adds no gradient."""
    steps = {s: step_of(config(train__distill=s)) for s in (0.0, 0.5, 1.0)}
    grads = {share: gradient(step) for share, step in steps.items()}
    assert float(grads[0.0].norm()) > 0
    torch.testing.assert_close(grads[0.5], 0.5 * grads[0.0], rtol=1e-4, atol=1e-7)
    assert float(grads[1.0].norm()) < 1e-4 * float(grads[0.0].norm())
    assert float(steps[0.5].loss) == float(steps[0.0].loss) == float(steps[1.0].loss)
    assert steps[0.5].probe() == steps[0.0].probe()


def test_a_changed_model_is_drawn_back_to_the_original() -> None:
    step = step_of(config(train__distill=1.0))
    found = distillation_of(step.config, "cpu")
    assert found is not None
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.manual_seed(0)))

    def distance() -> torch.Tensor:
        outputs, loss = step.forward(step.inputs[0], step.targets[0])
        return found.minimised(step.inputs[0], step.targets[0], outputs, loss)

    before = distance()
    before.backward()
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.sub_(0.01 * parameter.grad)
    assert distance().item() < before.item()


def test_the_distance_counts_the_positions_that_the_loss_counts() -> None:
    step = step_of(config(train__distill=1.0))
    found = distillation_of(step.config, "cpu")
    assert found is not None
    inputs, targets = step.inputs[0], step.targets[0]
    outputs = torch.randn(*inputs.shape, 300, generator=torch.manual_seed(0), requires_grad=True)

    def distance(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = found.minimised(inputs, targets, outputs, torch.zeros(()))
        return value, *torch.autograd.grad(value, outputs)

    wanted = step.model(inputs)
    whole = kernels.soft_cross_entropy(outputs, wanted)
    # Not a bit else where all positions have a target, or none is known.
    for given in (targets, targets[:, :3].float()):
        value, grad = distance(given)
        assert torch.equal(value, whole)
        assert torch.equal(grad, *torch.autograd.grad(whole, outputs, retain_graph=True))
    few = targets.clone()
    few[:, 3:] = kernels.NO_TARGET
    value, grad = distance(few)
    expected = kernels.soft_cross_entropy(outputs[:, :3], wanted[:, :3])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grad, *torch.autograd.grad(expected, outputs))
    assert not grad[:, 3:].any()


def test_a_teacher_of_its_own() -> None:
    """The gradient of the original is as with model.from; that of another teacher is not."""
    found = gradient(step_of(config(train__distill=1.0, train__teacher="base")))
    assert float(found.norm()) < 1e-4
    fresh = {"model": {"width": 8, "layers": 1, "heads": 2, "d_k": 4, "d_v": 4, "d_f": 8}}
    sections = config().to_dict() | fresh
    sections["train"] |= {"distill": 0.5, "teacher": "base"}
    sections["compress"] |= {"removal": "pressure"}
    step = step_of(Config.from_dict(sections))
    sections["train"] |= {"distill": 0.0, "teacher": ""}
    assert not torch.equal(gradient(step), gradient(step_of(Config.from_dict(sections))))


def test_a_teacher_in_bfloat16_takes_fewer_bytes_and_says_nearly_the_same() -> None:
    both = {"train__precision": "bfloat16", "train__distill": 1.0}
    exact = distillation_of(config(**both), "cpu")
    found = distillation_of(config(**both, train__teacher_precision="bfloat16"), "cpu")
    assert exact is not None
    assert found is not None
    saved = 0
    for (name, before), after in zip(
        exact._teacher.named_parameters(), found._teacher.parameters(), strict=True
    ):
        stays = before.dim() == 1 or name.startswith("embedding.")
        assert after.dtype is (torch.float32 if stays else torch.bfloat16), name
        saved += 0 if stays else 2 * after.numel()
    assert saved > 0
    step = step_of(config(**both))
    given = step.inputs[0], step.targets[0], *step.forward(step.inputs[0], step.targets[0])
    assert found.minimised(*given).item() == pytest.approx(exact.minimised(*given).item(), rel=1e-3)


def test_a_run_in_float32_has_no_teacher_in_bfloat16() -> None:
    with pytest.raises(
        UserError, match=r"train\.teacher_precision = 'bfloat16': this run computes"
    ):
        distillation_of(config(train__distill=0.5, train__teacher_precision="bfloat16"), "cpu")


def test_nothing_to_distill_from(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.distill = 0\.5: there is nothing to distill from"):
        tiny(tmp_path, train__distill=0.5)
    with pytest.raises(UserError, match=r"train\.teacher = 'base': .*set train\.distill"):
        tiny(tmp_path, train__teacher="base")


def test_a_teacher_that_is_missing() -> None:
    with pytest.raises(UserError, match=r"train\.teacher = 'gone': no such folder"):
        step_of(config(train__teacher="gone"))


def test_a_step_is_timed_without_its_teacher() -> None:
    found = config(train__distill=0.5)
    gone = replace(found, train=replace(found.train, teacher="gone"))
    step = measured_step(gone, lambda: found.model.build(found.task, 0), "cpu")
    step()
    assert float(step.loss) > 0


def test_a_run_reaches_its_work(tmp_path: Path) -> None:
    full = config().model.build(config().task, 0)
    work = work_per_token(full)
    found = config(target__fma=round(0.8 * work))
    trainer = Trainer(found, tmp_path / "run")
    summary = trainer.run()
    assert summary["held"]
    assert 0.7 * work < summary["fma_final"] <= 0.8 * work
