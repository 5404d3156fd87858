"""The compressor as a torch optimizer: the same steps, fresh parameters, clear refusals."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugelasso import Compressor, UserError
from gaugelasso.integrations import CompressorOptimizer, CompressorSchedule, LossModel
from tests.compress.own_loops import FAST, Loop, Perceptron


class Optimized(Loop):
    """The same model and data, stepped by the optimizer."""

    def __init__(self, **given: Any):
        super().__init__(**given)
        self.whole = LossModel(self.model, F.mse_loss)
        self.optimizer = CompressorOptimizer(self.compressor, self.whole)

    def backward(self, x: Tensor, share: float = 1.0) -> Tensor:
        loss = self.whole(x, self.teacher(x))["loss"]
        (loss * share).backward()
        return loss.detach()

    def step(self) -> None:
        self.backward(self.batch())
        self.optimizer.step()


def weights(loop: Loop) -> dict[str, Tensor]:
    return dict(loop.model.named_parameters())


def test_it_takes_the_steps_of_a_plain_loop() -> None:
    plain, optimized = Loop(steps=200, evaluate=True), Optimized(steps=200, evaluate=True)
    results = plain.run(), optimized.run()
    assert results[0] == results[1]
    assert results[0].fma < results[0].fma_initial
    for name, weight in weights(plain).items():
        assert torch.equal(weights(optimized)[name], weight)
    assert [e.loss_before for e in plain.compressor.history] == [
        e.loss_before for e in optimized.compressor.history
    ]


def test_a_cut_leaves_no_old_parameter_in_the_group() -> None:
    loop = Optimized(steps=200)
    before = {id(each) for each in loop.model.parameters()}
    cuts = 0
    while not loop.compressor.done:
        loop.step()
        (group,) = loop.optimizer.param_groups
        assert [id(each) for each in group["params"]] == [id(p) for p in loop.model.parameters()]
        cuts += bool(loop.optimizer.event is not None and loop.optimizer.event.dropped)
    assert cuts
    assert not before & {id(each) for each in loop.model.parameters()}
    loop.backward(loop.batch())
    loop.optimizer.zero_grad()
    assert all(each.grad is None for each in loop.model.parameters())


def test_a_step_has_the_mean_loss_of_its_passes() -> None:
    plain, optimized = Loop(), Optimized()
    x = plain.batch()
    plain.compressor.step(lambda: plain.loss(x))
    halves = [optimized.backward(each, share=0.5) for each in x.chunk(2)]
    assert optimized.optimizer.step().item() == pytest.approx(sum(halves).item() / 2)
    for name, weight in weights(plain).items():
        torch.testing.assert_close(weights(optimized)[name], weight)


class Summed(Perceptron):
    """Returns the share of its micro-batch in the mean over all, as models of transformers do."""

    def forward(self, x: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        outputs = super().forward(x)
        return outputs.square().sum() / given["num_items_in_batch"], outputs


def test_shares_of_a_loss_are_summed() -> None:
    model = Summed(8, 16, 3)
    optimizer = CompressorOptimizer(Compressor(model, 0.5, FAST), model)
    losses = []
    for x in torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).chunk(2):
        losses.append(model(x, num_items_in_batch=18)[0])
        losses[-1].backward()
    assert optimizer.step().item() == pytest.approx((losses[0] + losses[1]).item())


def test_only_passes_that_train_count() -> None:
    loop = Optimized()
    spoiled = torch.full((4, 8), torch.inf)
    loop.backward(spoiled)
    loop.optimizer.zero_grad()
    with torch.no_grad():
        loop.whole(spoiled, loop.teacher(spoiled))
    loop.whole.eval()
    loop.whole(spoiled, loop.teacher(spoiled))
    loop.whole.train()
    loss = loop.backward(loop.batch())
    assert loop.optimizer.step() == loss


def test_a_closure_runs_both_passes() -> None:
    plain, optimized = Loop(), Optimized()
    x = plain.batch()
    plain.compressor.step(lambda: plain.loss(x))
    with torch.no_grad():
        optimized.optimizer.step(lambda: optimized.backward(x))
    for name, weight in weights(plain).items():
        assert torch.equal(weights(optimized)[name], weight)


def test_an_own_probe_is_kept() -> None:
    model = Perceptron(8, 16, 3)
    compressor = Compressor(model, 0.5, FAST, lambda: 1.0)
    CompressorOptimizer(compressor, LossModel(model, F.mse_loss))
    assert compressor.probe is not None
    assert compressor.probe() == 1.0


def test_the_schedule_shows_the_rate_of_the_compressor() -> None:
    loop = Optimized(steps=60)
    schedule = CompressorSchedule(loop.optimizer)
    rates = []
    for _ in range(10):
        loop.step()
        schedule.step()
        rates.append(schedule.get_last_lr())
        assert rates[-1] == [float(loop.compressor.scalars.lr)]
        assert rates[-1] == [loop.optimizer.param_groups[0]["lr"]]
    assert rates[0] < rates[-1]  # the warm-up


def test_a_model_without_labels_has_no_loss() -> None:
    loop = Optimized()
    x = loop.batch()
    assert loop.whole(x).keys() == {"logits"}
    loop.whole(x)["logits"].sum().backward()
    with pytest.raises(UserError, match="LossModel has returned no loss since the last step"):
        loop.optimizer.step()


def test_a_gradient_scaler_is_refused() -> None:
    loop = Optimized()
    before = {name: weight.clone() for name, weight in weights(loop).items()}
    scaler = torch.amp.GradScaler("cpu")
    x = loop.batch()
    scaler.scale(loop.whole(x, loop.teacher(x))["loss"]).backward()
    with pytest.raises(UserError, match=r"GradScaler \(fp16\).*use bf16"):
        scaler.step(loop.optimizer)
    assert all(torch.equal(weights(loop)[name], weight) for name, weight in before.items())


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Optimized()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="one of 2 processes"):
        loop.step()


def test_parameters_that_nothing_would_train_are_refused() -> None:
    loop = Optimized()
    with pytest.raises(UserError, match="add_param_group"):
        loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    loop.whole.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(UserError, match=r"parameter 'scale' of the LossModel is not in"):
        CompressorOptimizer(loop.compressor, loop.whole)
    other = LossModel(Perceptron(8, 4, 3), F.mse_loss)
    with pytest.raises(UserError, match="no part of the LossModel"):
        CompressorOptimizer(loop.compressor, other)
