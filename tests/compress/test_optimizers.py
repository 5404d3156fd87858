"""The optimizer's state is a declared list: anything in it follows balances, anchors and cuts."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from gaugelasso import Compressor, CompressorOptions, Transformer, TransformerSpec
from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.flat_optimizer import FlatOptimizer, StateVector
from gaugelasso.compress.optimizers import OPTIMIZERS
from tests.compress.test_own_models import residual

SPEC = TransformerSpec.uniform(
    width=8, layers=2, heads=2, d_k=4, d_v=4, d_f=8, length=6, inputs=9, outputs=9
)


class SignMomentum(FlatOptimizer):
    """A step of the sign of m + rho r. Keeps the average weight as well."""

    def __init__(
        self,
        store: FlatStore,
        matrices: Mapping[str, int],
        beta: float,
        beta_second: float,
        weight_decay: float,
    ):
        super().__init__(store, matrices)
        self.beta = beta
        self.state += [
            StateVector("trace", torch.zeros_like(store.weight), power=-1),
            StateVector("mean", store.weight.clone(), power=1),
        ]

    @property
    def momentum(self) -> Tensor:
        return self.state[0].values

    def observe_(self, sound: Tensor) -> None:
        gradient = self.store.grad.masked_fill_(~sound, 0.0)
        self.momentum.lerp_(gradient, (1 - self.beta) * float(sound))

    def step_(
        self, penalty: Tensor, rho: Tensor, lr: Tensor, elementwise: Tensor | None = None
    ) -> None:
        rates = lr if elementwise is None else elementwise
        self.store.weight.sub_(rates * (self.momentum + rho * penalty).sign())
        self.state[1].values.lerp_(self.store.weight, 0.1)


def train(model: Transformer, compressor: Compressor, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        tokens = torch.randint(9, (4, 6), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        compressor.step(loss)


def test_another_optimizer_is_one_class_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "sign", SignMomentum)
    options = CompressorOptions(
        optimizer="sign", lr=0.02, interval=5, trust=2.0, drop_tolerance=1e9
    )
    model = Transformer(SPEC, seed=0)
    compressor = Compressor(model, loss_target=3.0, options=options)
    train(model, compressor, 40)
    assert any(event.dropped for event in compressor.history)
    saved = compressor.state_tensors()
    for name, parameter in model.named_parameters():
        for kind in ("trace", "mean"):
            assert saved[f"{kind}.{name}"].shape == parameter.shape
    assert not any(name.startswith(("momentum", "second", "decay")) for name in saved)


def test_a_copy_of_the_weights_stays_one_through_every_change() -> None:
    """Appended with power 1, under balances, anchors, cuts, and cuts that are undone."""
    options = CompressorOptions(lr=0.02, interval=5, trust=2.0, drop_tolerance=1e9)
    model = Transformer(SPEC, seed=0)
    compressor = Compressor(model, loss_target=3.0, options=options)
    copy = StateVector("average", compressor.optimizer.store.weight.clone(), power=1)
    compressor.optimizer.state.append(copy)
    begun = len(copy.values)
    for _ in range(8):
        train(model, compressor, 4)
        copy.values.copy_(compressor.optimizer.store.weight)
        undo = compressor.state.snapshot_values()
        compressor.state.balance_(pressing=True)
        assert torch.equal(copy.values, compressor.optimizer.store.weight)
        undo()
        assert torch.equal(copy.values, compressor.optimizer.store.weight)
        back = compressor.state.snapshot_modules()
        before = copy.values
        compressor.event_()
        assert torch.equal(copy.values, compressor.optimizer.store.weight)
        if len(copy.values) < len(before):
            back()
            assert copy.values is before
            compressor.event_()
            assert torch.equal(copy.values, compressor.optimizer.store.weight)
    assert len(copy.values) < begun
    assert "average.classifier.read.gain" in compressor.state_tensors()


def test_state_of_the_last_elements_follows_a_cut() -> None:
    model = residual(3, 4, 5, 2, 1)
    store = FlatStore(model, model.axis_table())
    tail = StateVector("tail", torch.arange(5.0), power=-2)
    assert {name: view.tolist() for name, view in tail.views(store).items()} == {
        "blocks.0.bias": [0.0, 1.0, 2.0, 3.0, 4.0]
    }
    size = len(store)
    tail.follow_cut_(torch.tensor([0, 3, size - 4, size - 2]), size)
    assert tail.values.tolist() == [1.0, 3.0]


@pytest.mark.parametrize(("power", "expected"), [(1, 6.0), (2, 18.0), (0, 2.0), (-1, 2 / 3)])
def test_state_is_multiplied_by_its_power(power: int, expected: float) -> None:
    vector = StateVector("state", torch.tensor([2.0]), power)
    vector.rescale_(torch.tensor([7.0, 3.0]))
    assert vector.values.tolist() == pytest.approx([expected])
