"""The optimizer in its fused form, against the plain one.

On a GPU as compiled; elsewhere by Triton's interpreter, where Triton is installed.
"""

import pytest
import torch
from torch import Tensor

from gaugelasso import kernels
from gaugelasso.axes import AxisTable
from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.optim import CoupledOptimizer, MatrixPlan
from tests.kernels import DEVICE
from tests.kernels.updates import INF, MARKS, NAN, ORTHOGONAL, both, draw, near, scalar
from tests.toys import Toy

triton = pytest.importorskip("triton")

from gaugelasso.kernels.gpu import optim  # noqa: E402

pytestmark = MARKS


def matrices(*shapes: tuple[int, int]) -> FlatStore:
    tensors = {f"m{i}": draw(*shape, seed=i) for i, shape in enumerate(shapes)}
    table = AxisTable(axes=(), matrices=dict.fromkeys(tensors, 1))
    model = Toy(table, vector=draw(1300), **tensors).float().to(DEVICE)
    return FlatStore(model, table)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("beta", [0.95, 0.3, 0.0])
@pytest.mark.parametrize("kind", ["muon", "adam"])
def test_optimizer(
    kind: str, beta: float, weight_decay: float, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps along two penalties, with one between them that is not sound."""
    # So that the largest matrix has more.
    monkeypatch.setattr("gaugelasso.kernels.gpu.optim.PARTS", 2)
    store = matrices((3, 5), (40, 40), (5, 3), (31, 70))
    start, lr = store.weight.clone(), 0.01
    names = {name: 1 for name in store.segments if name != "vector"}

    def work() -> list[Tensor]:
        store.weight.copy_(start)
        optimizer = CoupledOptimizer(store, names, kind, beta, 0.99, weight_decay)
        rates = lr * draw(len(optimizer.second)).sigmoid() if bounded else None
        gradients = []
        for seed, rho in enumerate((0.0, 0.5, 3.0)):
            sound = seed != 1
            store.grad.copy_(draw(len(store), seed=seed))
            store.grad[5] *= 1 if sound else NAN
            optimizer.observe_(torch.tensor(sound, device=DEVICE))
            rate = scalar(lr * sound)
            elementwise = rates * sound if rates is not None else None
            optimizer.step_(draw(len(store), seed=seed + 9), scalar(rho), rate, elementwise)
            gradients.append(store.grad.clone())
        state = optimizer.momentum, optimizer.second, optimizer.decay
        return [(store.weight - start) / lr, *gradients, *state]

    (plain, fused), *state = both(work)
    end = store.matrix_end if kind == "muon" else 0
    near(plain[:end], fused[:end], ORTHOGONAL)
    near(plain[end:], fused[end:], 1e-4)
    for plain, fused in state:
        near(plain, fused)


def test_a_step_before_any_gradient_divides_by_nothing() -> None:
    store = matrices((3, 5))

    def work() -> list[Tensor]:
        optimizer = CoupledOptimizer(store, {"m0": 1})
        optimizer.observe_(torch.tensor(False, device=DEVICE))
        optimizer.step_(draw(len(store)), scalar(0.0), scalar(0.1))
        return [store.weight, optimizer.decay]

    for plain, fused in both(work):
        assert torch.equal(plain, fused)
        assert fused.isfinite().all()


def test_a_step_without_bounds_is_not_hidden() -> None:
    """Weights that are no numbers are found out; those clipped to a step would not be."""
    store = matrices((3, 5))
    start = store.weight.clone()

    def work() -> list[Tensor]:
        store.weight.copy_(start)
        optimizer = CoupledOptimizer(store, {"m0": 1})
        optimizer.step_(draw(len(store)), scalar(INF), scalar(0.1))
        return [store.weight]

    for plain, fused in both(work):
        assert plain.isnan().all()
        assert fused.isnan().all()


def test_without_vectors_there_are_matrices_alone() -> None:
    """A tail of no elements."""
    model = Toy(AxisTable(axes=(), matrices={"m": 1}), m=draw(4, 6)).float().to(DEVICE)
    store = FlatStore(model, model.declared)
    start = store.weight.clone()

    def work() -> list[Tensor]:
        store.weight.copy_(start)
        optimizer = CoupledOptimizer(store, {"m": 1})
        store.grad.copy_(draw(24, seed=1))
        optimizer.observe_(torch.tensor(True, device=DEVICE))
        optimizer.step_(draw(24, seed=2), scalar(0.1), scalar(0.1))
        return [(store.weight - start) / 0.1]

    for plain, fused in both(work):
        near(plain, fused, ORTHOGONAL)


@pytest.mark.parametrize("parts", [2, 256])
@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_matrices_come_and_go(rho: float, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded batches in and out, as they are, without what happens to them in between."""
    monkeypatch.setattr(optim, "PARTS", parts)
    store = matrices((31, 70), (20, 65), (130, 33), (3, 5), (1, 1))
    plan = MatrixPlan(store, {name: 1 for name in store.segments if name != "vector"})
    momentum, gradient = draw(len(store), seed=1), draw(len(store), seed=2)
    aim = momentum + rho * gradient
    expected, weight, lr = store.weight.clone(), store.weight.clone(), 0.3
    padding = 0
    for number, bucket in enumerate(plan.buckets):
        batch, shape = bucket.gather(aim), (bucket.rows, bucket.cols)
        padding += int((batch == 0).sum())
        norms = batch.norm(dim=(1, 2), keepdim=True)
        drive = momentum, gradient, scalar(rho)
        got = optim.gather(*drive, bucket.places, shape, torch.float32, 1e-20)
        near(batch / norms, got)
        update = draw(*batch.shape, seed=number)  # padding of it goes nowhere
        bucket.scatter_(expected, bucket.gather(expected) - lr * bucket.scale * update)
        optim.scatter_(weight, update, bucket.scale, scalar(lr), bucket.places)
    assert padding
    near(expected, weight)
    assert torch.equal(weight[plan.size :], store.weight[plan.size :])
    assert not torch.equal(weight, store.weight)


def test_matrices_of_zeros_have_no_norm() -> None:
    places = torch.tensor([[0, 2, 3, 3, 1]], device=DEVICE)
    zeros = torch.zeros(6, device=DEVICE)
    drive = zeros, zeros, scalar(1.0)
    assert not optim.gather(*drive, places, (2, 3), torch.float32, 1e-20).any()


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("used", ["m0", "vector"])
def test_a_late_backward_pass_is_refused(used: str, plain: bool) -> None:
    """It would take the new weights for those that the loss was made with."""
    store = matrices((3, 5))
    optimizer = CoupledOptimizer(store, {"m0": 1})
    weight = next(p for p, _ in store._gradients if p.shape == store.segments[used].shape)
    loss = weight.square().sum()
    with torch.no_grad(), kernels.reference_kernels(plain):
        optimizer.step_(draw(len(store)), scalar(0.0), scalar(0.1))
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
