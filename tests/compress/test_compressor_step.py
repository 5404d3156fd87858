"""Steps of a compressor: the task, pressure, momentum, slow weights and what is no number."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.compress.compressor import Compressor
from gaugelasso.models import Transformer, TransformerSpec
from tests.compress.small_compressor import FILTERS, fade_, start, task_loss, train


def test_switched_off_is_plain_training() -> None:
    compressor = start(interval=1, solver="fixed", rho=1.0)
    plain = start(target=-1.0)
    compressor.set_pressure_(False)
    assert train(compressor, 3) == [None] * 3
    train(plain, 3)
    assert torch.equal(compressor.optimizer.store.weight, plain.optimizer.store.weight)


def test_pressure_moves_weights_but_not_momentum() -> None:
    pressed, plain = start(solver="fixed", rho=1.0), start(solver="fixed", rho=0.0)
    train(pressed, 1)
    train(plain, 1)
    assert torch.equal(pressed.optimizer.momentum, plain.optimizer.momentum)
    assert torch.equal(pressed.optimizer.second, plain.optimizer.second)
    assert not torch.equal(pressed.optimizer.store.weight, plain.optimizer.store.weight)


def slow_weights(compressor: Compressor) -> dict[str, Tensor]:
    tensors = named_tensors(compressor.model)
    return {norm.weight: tensors[norm.weight].clone() for norm in compressor.state.table.norms}


def test_slow_weights_follow_the_gain_under_pressure() -> None:
    """One step's share of `norm_rate`, after the step's own update of the gain."""
    compressor = start(solver="fixed", rho=1e-3, norm_rate=0.19, interval=2, lr=0.1)
    before = slow_weights(compressor)
    train(compressor, 1)
    tensors = named_tensors(compressor.model)
    for norm in compressor.state.table.norms:
        aim, energy = tensors[norm.gain].detach().square(), tensors[norm.energy]
        old = before[norm.weight]
        scaled = aim * (old * energy).sum() / (aim * energy).sum()
        assert torch.allclose(tensors[norm.weight], 0.9 * old + 0.1 * scaled, rtol=1e-6)
        assert not torch.allclose(tensors[norm.weight], old, rtol=1e-3)


def test_slow_weights_rest_without_pressure() -> None:
    compressor = start(target=-1.0)
    before = slow_weights(compressor)
    train(compressor, 3)
    for name, weight in slow_weights(compressor).items():
        assert torch.equal(weight, before[name])


def test_the_step_clears_the_gradient() -> None:
    compressor = start()
    train(compressor, 1)
    assert all(parameter.grad is None for parameter in compressor.model.parameters())


def test_a_restored_compressor_goes_on_as_the_first_would() -> None:
    first = start(interval=2, loss_smoothing=0.5)
    fade_(first, FILTERS, [1])
    fade_(first, "D", [2])
    train(first, 3)
    model = Transformer(TransformerSpec.from_dict(first.structure)).double()
    model.load_state_dict(first.model.state_dict())
    second = Compressor(model, 1e9, first.options)
    second.load_state_tensors_(first.state_tensors(), first.steps)
    train(first, 3)
    train(second, 3)
    assert first.widths[FILTERS] == 4
    assert torch.equal(first.optimizer.store.weight, second.optimizer.store.weight)


def test_zero_grad_in_between_changes_nothing() -> None:
    plain, cleared = start(), start()
    train(plain, 3)
    for _ in range(3):
        cleared.model.zero_grad()
        loss = task_loss(cleared.model)
        loss.backward()
        cleared.step(loss)
    for one, other in zip(plain.model.parameters(), cleared.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_relative_step_bounds_the_change_of_what_is_not_a_matrix() -> None:
    bound = 0.01
    compressor = start(relative_step=bound, lr=0.1)
    before = {n: p.detach().clone() for n, p in compressor.model.named_parameters()}
    train(compressor, 1)
    matrices = compressor.state.table.matrices
    for name, new in compressor.model.named_parameters():
        change = (new.detach() - before[name]).abs()
        if name in matrices:
            assert change.square().mean().sqrt() > 0.05
        elif new.ndim == 1:
            assert change.max() > 0
            assert bool((change <= 1.001 * bound * before[name].abs()).all())


def test_a_rate_of_zero_moves_nothing() -> None:
    compressor = start(relative_step=0.05)
    compressor.set_lr_(0.0)
    with torch.no_grad():
        named_tensors(compressor.model)["embedding.write.scale"][0] = 0
    before = [parameter.detach().clone() for parameter in compressor.model.parameters()]
    train(compressor, 1)
    pairs = zip(before, compressor.model.parameters(), strict=True)
    assert all(torch.equal(old, new) for old, new in pairs)


def test_a_group_at_zero_can_come_back() -> None:
    compressor = start(relative_step=0.05, lr=0.1)
    scale = named_tensors(compressor.model)["embedding.write.scale"]
    with torch.no_grad():
        scale[0] = 0
    train(compressor, 3)
    assert scale[0] != 0


def test_without_sweeps_normalisers_are_anchored_all_the_same() -> None:
    compressor = start(sinkhorn_sweeps=0, anchor=0.01)
    train(compressor, 1)
    before = named_tensors(compressor.model)["classifier.read.gain"].detach().clone()
    compressor.event_()
    after = named_tensors(compressor.model)["classifier.read.gain"]
    assert not torch.allclose(after, before)


def test_normalisers_come_down_to_their_anchors_under_pressure() -> None:
    """By a factor of four at most in an event: steps become larger for it, beside the weights."""
    compressor = start(anchor=0.01)
    train(compressor, 1)

    def parts() -> tuple[Tensor, Tensor, Tensor]:
        tensors = named_tensors(compressor.model)
        norm = next(n for n in compressor.state.table.norms if n.gain == "classifier.read.gain")
        return tensors[norm.weight], tensors[norm.gain].detach(), tensors[norm.energy]

    def level() -> float:
        weight, _, energy = parts()
        return float((weight * energy).sum())

    for rho, share in ((0.0, 1.0), (1e-9, 0.25), (0.0, 1.0)):
        before = level()
        compressor.scalars.rho.fill_(rho)
        compressor.event_()
        assert level() / before == pytest.approx(share, rel=1e-4)
    compressor.scalars.rho.fill_(1e-9)
    seen = [compressor.event_() and level() for _ in range(20)]
    assert all(now > 0.2499 * then for then, now in pairwise(seen))
    _, gain, energy = parts()
    heard = gain.square() * energy
    typical = ((heard * energy.log()).sum() / heard.sum()).exp()
    assert seen[-1] == pytest.approx(0.01 * float(typical), rel=0.05)
    assert seen[-1] < 0.25 * before


def test_slow_weights_follow_from_the_first_pressure_on() -> None:
    """Before it they stand still; after it they go on when pressure is off, also when resumed."""
    compressor = start(lr=0.1, interval=1000)
    compressor.set_pressure_(False)
    still = slow_weights(compressor)
    train(compressor, 2)
    assert all(torch.equal(now, still[name]) for name, now in slow_weights(compressor).items())
    compressor.set_pressure_(True)
    train(compressor, 1)
    compressor.set_pressure_(False)
    resumed = start(lr=0.1, interval=1000)
    resumed.load_state_tensors_(compressor.state_tensors(), compressor.steps)
    for one in (compressor, resumed):
        before = slow_weights(one)
        train(one, 1)
        assert not all(torch.equal(now, before[name]) for name, now in slow_weights(one).items())


@pytest.mark.parametrize("gradient", [None, "nan", "inf", "1e200"])
def test_a_step_that_is_no_number_changes_nothing(gradient: str | None) -> None:
    """Not the weights, nor what the next step is made of."""
    compressor = start(lr=0.1, interval=4)
    train(compressor, 2)
    kept = {**named_tensors(compressor.model), **compressor.state_tensors()}
    before = {name: tensor.detach().clone() for name, tensor in kept.items()}
    loss = task_loss(compressor.model)
    loss.backward()
    weight = next(compressor.model.parameters())
    assert weight.grad is not None
    if gradient:
        weight.grad.view(-1)[0] = float(gradient)
    assert compressor.step(loss * (1 if gradient else float("nan"))) is None
    free = {"skipped", "failing", "streak", "rho", "pressed"}
    energies = {norm.energy for norm in compressor.state.table.norms}
    for name, tensor in {**named_tensors(compressor.model), **compressor.state_tensors()}.items():
        if name not in free | energies:
            assert torch.equal(tensor, before[name]), name
    assert float(compressor.rho) == 0
    assert [float(compressor.skipped), float(compressor.failing)] == [1, 1]
    # No event after it, although one was due: its inputs are not to be trusted.
    train(compressor, 1)
    assert [float(compressor.skipped), float(compressor.failing)] == [1, 0]
    assert compressor.resume_state.finite()
