"""Coupled Muon and Adam against their formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gaugelasso.axes import AxisTable
from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.optim import CoupledOptimizer, MatrixPlan, newton_schulz
from tests.toys import Toy, exact, gaussian, pairs

SHAPES = [(3, 5), (4, 4), (5, 3), (2, 9), (7, 6), (1, 8), (8, 1), (12, 3)]


def matrices(*shapes: tuple[int, ...]) -> FlatStore:
    """Matrices m0, m1, ... and one vector of ones, on no axis: an optimizer asks for none."""
    tensors = {f"m{i}": gaussian(*shape, seed=i) for i, shape in enumerate(shapes)}
    model = Toy(
        AxisTable(axes=(), matrices=dict.fromkeys(tensors, 1)), vector=torch.ones(4), **tensors
    )
    return FlatStore(model, model.axis_table())


def rows_of(store: FlatStore) -> dict[str, int]:
    return {name: 1 for name in store.segments if name != "vector"}


def orthogonal(matrix: Tensor) -> Tensor:
    """One matrix on its own: wide, orthogonalised, of RMS 1."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    result = newton_schulz(wide) * max(matrix.shape) ** 0.5
    return result if matrix.shape[0] <= matrix.shape[1] else result.T


@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (1, 6)])
def test_padding_changes_nothing(shape: tuple[int, int]) -> None:
    x = gaussian(*shape, seed=1)
    padded = newton_schulz(F.pad(x, (0, 4, 0, 2)))
    assert torch.allclose(padded[: shape[0], : shape[1]], newton_schulz(x), rtol=0, atol=1e-12)
    assert padded[shape[0] :].count_nonzero() == padded[:, shape[1] :].count_nonzero() == 0


def test_singular_values_come_near_one() -> None:
    values = torch.linalg.svdvals(newton_schulz(gaussian(20, 8, 24, seed=2)))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_singular_directions_are_kept() -> None:
    x = gaussian(4, 7, seed=3)
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    middle = left.T @ newton_schulz(x) @ right.T
    assert torch.allclose(middle, middle.diagonal().diag(), rtol=0, atol=1e-10)


def test_batched_shapes_equal_one_by_one() -> None:
    store = matrices(*SHAPES)
    plan = MatrixPlan(store, rows_of(store))
    gradient = gaussian(store.matrix_end, seed=5)
    update = plan.orthogonalise(gradient)
    for name in rows_of(store):
        segment = store.segments[name]
        expected = orthogonal(segment.view(gradient))
        assert torch.allclose(segment.view(update), expected, rtol=0, atol=1e-10)


def test_leading_dims_are_rows() -> None:
    store = matrices((2, 3, 5), (4, 2, 2, 3))
    gradient = gaussian(store.matrix_end, seed=5)
    update = MatrixPlan(store, {"m0": 2, "m1": 1}).orthogonalise(gradient)
    for name, flat in {"m0": (6, 5), "m1": (4, 12)}.items():
        segment = store.segments[name]
        expected = orthogonal(segment.view(gradient).reshape(flat))
        assert torch.allclose(segment.view(update).reshape(flat), expected, rtol=0, atol=1e-10)


def test_update_has_rms_about_one() -> None:
    store = matrices(*SHAPES)
    small = 1e-6 * gaussian(store.matrix_end, seed=6)
    update = MatrixPlan(store, rows_of(store)).orthogonalise(small)
    for name in rows_of(store):
        rms = store.segments[name].view(update).square().mean().sqrt()
        assert 0.6 < rms < 1.3


def test_coupled_adam_by_hand() -> None:
    """u = (m/(1-b1^t) + p) / sqrt(v/(1-b2^t) + p^2), clipped, after decay by 1 - lr wd."""
    model = pairs((1, 1, 1))
    store = FlatStore(model, model.axis_table())
    optimizer = CoupledOptimizer(
        store, {}, kind="adam", beta=0.9, beta_second=0.8, weight_decay=0.5
    )
    lr, weights = 0.1, store.weight.tolist()
    m, v = [0.0, 0.0], [0.0, 0.0]
    # Task gradients and pressures of two elements over three steps.
    steps = [([1.0, -2.0], [0.0, 0.5]), ([0.3, 4.0], [2.0, -1.0]), ([-5.0, 0.1], [0.1, 3.0])]
    clipped = False
    for t, (gradient, pressure) in enumerate(steps, start=1):
        store.grad.copy_(torch.tensor(gradient))
        optimizer.observe_(torch.tensor(True))
        optimizer.step_(exact(pressure), exact(1.0), exact(lr))
        for i, (g, p) in enumerate(zip(gradient, pressure, strict=True)):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.8 * v[i] + 0.2 * g * g
            update = (m[i] / (1 - 0.9**t) + p) / math.sqrt(v[i] / (1 - 0.8**t) + p * p)
            clipped |= abs(update) > 1
            weights[i] = weights[i] * (1 - lr * 0.5) - lr * max(-1.0, min(1.0, update))
        assert store.weight.tolist() == pytest.approx(weights, rel=1e-9)
    assert clipped
    assert optimizer.momentum.tolist() == pytest.approx(m)
    assert optimizer.second.tolist() == pytest.approx(v)


def test_weight_decay_spares_the_matrices() -> None:
    store = matrices((3, 4))
    optimizer = CoupledOptimizer(store, rows_of(store), weight_decay=0.5)
    before = store.weight.clone()
    optimizer.observe_(torch.tensor(True))
    optimizer.step_(torch.zeros_like(before), exact(1.0), exact(0.1))
    end = store.matrix_end
    assert torch.equal(store.weight[:end], before[:end])
    assert torch.allclose(store.weight[end:], before[end:] * 0.95)


def test_muon_by_hand() -> None:
    """Every matrix moves along its orthogonalised m + p, on its own."""
    store = matrices((3, 4), (5, 2))
    optimizer = CoupledOptimizer(store, rows_of(store), beta=0.9)
    m = torch.zeros_like(store.weight)
    for t in range(3):
        gradient, pressure = gaussian(len(store), seed=t), 0.3 * gaussian(len(store), seed=t + 9)
        before = store.weight.clone()
        store.grad.copy_(gradient)
        optimizer.observe_(torch.tensor(True))
        optimizer.step_(pressure / 3, exact(3.0), exact(0.1))
        m = 0.9 * m + 0.1 * gradient
        for name in rows_of(store):
            view = store.segments[name].view
            moved = (view(before) - view(store.weight)) / 0.1
            assert torch.allclose(moved, orthogonal(view(m + pressure)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["muon", "adam"])
def test_momentum_follows_the_task_gradient_alone(kind: str) -> None:
    states = []
    for pressure in (0.0, 100.0):
        store = matrices((3, 4))
        optimizer = CoupledOptimizer(store, {"m0": 1}, kind=kind)
        for step in range(3):
            store.grad.copy_(gaussian(len(store), seed=step))
            optimizer.observe_(torch.tensor(True))
            optimizer.step_(store.weight.clone(), exact(pressure), exact(0.1))
        states.append((optimizer.momentum, optimizer.second, store.weight))
    (momentum, second, weight), (pressed_momentum, pressed_second, pressed_weight) = states
    assert torch.equal(momentum, pressed_momentum)
    assert torch.equal(second, pressed_second)
    assert not torch.equal(weight, pressed_weight)


def test_state_views_write_through() -> None:
    store = matrices((3, 4))
    optimizer = CoupledOptimizer(store, rows_of(store))
    states = optimizer.states()
    assert states["momentum"].keys() == store.segments.keys()
    for flat, views in ((optimizer.momentum, "momentum"), (optimizer.second, "second")):
        states[views]["vector"].fill_(3)
        assert flat[-4:].tolist() == [3] * 4
        assert flat[:-4].count_nonzero() == 0
