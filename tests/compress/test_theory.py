"""The paper's propositions, on models small enough to be solved to rounding.

Everything goes through `Penalty` itself; prices, counts and groups are the toys' own.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gaugelasso.axes import named_tensors
from gaugelasso.compress import reference
from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.penalty import Calibration, Penalty, ranked
from gaugelasso.compress.pricing import ACCOUNTINGS, prices
from tests.toys import Toy, balanced_utility, chain, gaussian, pairs, penalise, value

Task = Callable[[dict[str, Tensor]], Tensor]
WOLFE = "strong_wolfe"


def slope(store: FlatStore, task: Task) -> Tensor:
    """dL/dw at the store's weights."""
    flat = store.weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(task(store.views(flat)), flat)
    return gradient


def solve_(
    model: Toy,
    store: FlatStore,
    penalty: Penalty,
    task: Task,
    rho: float,
    calibration: Calibration = "efficiency",
) -> Tensor:
    """Bring the weights to a critical point of task + rho * penalty; returns dL/dw there."""

    def gradient(weight: Tensor) -> Tensor:
        store.weight.copy_(weight)
        return slope(store, task) + rho * penalty.gradient(weight)

    point = torch.nn.Parameter(store.weight.clone())
    search = torch.optim.LBFGS(
        [point], max_iter=500, tolerance_change=0, tolerance_grad=1e-6, line_search_fn=WOLFE
    )

    def evaluate() -> Tensor:
        point.grad = gradient(point.detach())
        return task(store.views(store.weight)) + rho * value(model, calibration=calibration)

    search.step(evaluate)
    # Newton, with the curvature taken by differences, goes on to rounding.
    weight, h = point.detach(), 1e-5
    for _ in range(5):
        if gradient(weight).abs().max() < 1e-13:
            break
        sides = [(gradient(weight + d), gradient(weight - d)) for d in h * torch.eye(len(store))]
        curvature = torch.stack([(up - down) / (2 * h) for up, down in sides])
        weight = weight - torch.linalg.solve(curvature, gradient(weight))
    assert gradient(weight).abs().max() < 1e-12, "not at a critical point"
    assert penalty.norms(weight)[: penalty.none].min() > 1e-3, "a group died"
    return slope(store, task)


def quadratic(size: int) -> Task:
    """A convex task with every parameter coupled to every other."""
    root = torch.eye(size) + 0.2 * gaussian(size, size, seed=11)
    aim = gaussian(size, seed=12)
    return lambda views: (
        0.5 * (root @ (torch.cat([v.flatten() for v in views.values()]) - aim)).square().sum()
    )


def factorise(views: dict[str, Tensor]) -> Tensor:
    """|a' b - M|^2 / 2 for each axis of `pairs`: gauge-connected, like weights of a network."""
    total = torch.zeros(()).double()
    for k in range(len(views) // 2):
        product = views[f"a{k}"].T @ views[f"b{k}"]
        total = total + 0.5 * (product - 2 * gaussian(*product.shape, seed=13 + k)).square().sum()
    return total


# --- the penalty is what it says ------------------------------------------------------


@pytest.mark.parametrize("form", ["symmetric", "one_sided", "product_norm"])
@pytest.mark.parametrize("calibration", ["efficiency", "geometry"])
def test_gradient_is_the_slope_of_the_value(form: str, calibration: str) -> None:
    model = chain(3, 4, 5, 2)
    store, penalty = penalise(model, form, calibration)
    direction, h = gaussian(len(store), seed=3), 1e-5
    slope = torch.dot(penalty.gradient(store.weight), direction)
    values = []
    for step in (h, -2 * h):
        store.weight.add_(direction, alpha=step)
        values.append(float(value(model, form, calibration)))
    assert float(slope) == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-7)


@pytest.mark.parametrize("form", ["symmetric", "one_sided", "product_norm"])
def test_a_zero_slice_is_not_pulled(form: str) -> None:
    model = pairs((3, 4, 2))
    store, penalty = penalise(model, form)
    model.a0.data[1] = 0
    gradient = store.views(penalty.gradient(store.weight))["a0"]
    assert torch.isfinite(gradient).all()
    assert gradient[1].count_nonzero() == 0
    assert gradient[0].count_nonzero() == 4


def test_strength_is_price_over_root_count() -> None:
    model = pairs((2, 4, 9), (3, 1, 16), price=5)
    _, penalty = penalise(model)
    spans = penalty.ranges
    assert penalty.strength[spans["axis0"].side("a")].tolist() == pytest.approx([5 / 2] * 2)
    assert penalty.strength[spans["axis0"].side("b")].tolist() == pytest.approx([5 / 3] * 2)
    assert penalty.strength[spans["axis1"].side("a")].tolist() == pytest.approx([10 / 1] * 3)
    assert penalty.strength[spans["axis1"].side("b")].tolist() == pytest.approx([10 / 4] * 3)


# --- proposition: equilibrium identity ------------------------------------------------


def test_utility_equals_penalty_at_a_critical_point() -> None:
    """omega = -<T, dL/dT> = lambda |T| for every slice of disjoint groups."""
    model, rho = pairs((3, 4, 2), (2, 3, 5)), 0.05
    store, penalty = penalise(model)
    task_slope = solve_(model, store, penalty, quadratic(len(store)), rho)
    utility = penalty.group_sums(-store.weight * task_slope)
    expected = rho * penalty.strength * penalty.norms(store.weight)
    assert torch.allclose(utility, expected, rtol=1e-9, atol=0)


def test_corrected_utility_is_exact_where_groups_overlap() -> None:
    """omega = -<w, dL/dw> on each slice, both sides, though `middle` is in two groups."""
    model = chain(4, 2, 2, 4)
    store, penalty = penalise(model)
    target, rho = 3 * gaussian(4, 4, seed=13), 0.05

    def task(views: dict[str, Tensor]) -> Tensor:
        return 0.5 * (views["first"] @ views["middle"] @ views["last"] - target).square().sum()

    task_slope = solve_(model, store, penalty, task, rho)
    first_order = penalty.group_sums(-store.weight * task_slope)
    alone = balanced_utility(model)
    for name, utility in penalty.utility(store.weight).items():
        span = penalty.ranges[name]
        assert torch.allclose(rho * utility, first_order[span.side("a")], rtol=1e-9)
        assert torch.allclose(rho * utility, first_order[span.side("b")], rtol=1e-9)
        # The penalty of the slice on its own axis alone says too little.
        assert (utility > 1.1 * alone[name]).all()


def test_corrected_utility_is_the_plain_one_where_groups_do_not_overlap() -> None:
    model = pairs((3, 4, 2), (2, 3, 5))
    store, penalty = penalise(model)
    table, tensors = model.axis_table(), named_tensors(model)
    price = prices(table, ACCOUNTINGS["fma"], tensors)
    plain = reference.balanced_utility(table, tensors, price)
    for name, utility in penalty.utility(store.weight).items():
        assert torch.allclose(utility, plain[name], rtol=1e-12)


# --- proposition: gauge-balanced utility ----------------------------------------------


@pytest.mark.parametrize("calibration", ["efficiency", "geometry"])
def test_balance_minimises_the_penalty_over_the_gauge(calibration: str) -> None:
    model = pairs((3, 4, 2), (2, 3, 5))
    store, penalty = penalise(model, calibration=calibration)
    table, tensors = model.axis_table(), named_tensors(model)
    reference.balance_(table, tensors, sweeps=10, rounded=False)
    balanced = store.weight.clone()
    least = value(model, calibration=calibration)
    means = balanced_utility(model, calibration)
    assert float(least) == pytest.approx(2 * sum(float(gm.sum()) for gm in means.values()))
    for axis in table.axes:
        for alpha in torch.logspace(-1, 1, 21).double():
            store.weight.copy_(balanced)
            reference.rescale_(axis, alpha.expand(penalty.ranges[axis.name].width), tensors)
            if abs(alpha - 1) < 1e-6:
                assert float(value(model, calibration=calibration)) == pytest.approx(float(least))
            else:
                assert value(model, calibration=calibration) > least * (1 + 1e-4)


def test_geometric_mean_does_not_depend_on_the_gauge() -> None:
    model = pairs((3, 4, 2), (2, 3, 5))
    _, penalty = penalise(model)
    before = balanced_utility(model)
    for axis in model.axis_table().axes:
        factor = gaussian(penalty.ranges[axis.name].width, seed=4).exp()
        reference.rescale_(axis, factor, named_tensors(model))
    after = balanced_utility(model)
    for name, values in before.items():
        assert torch.allclose(after[name], values, rtol=1e-12)


@pytest.mark.parametrize("calibration", ["efficiency", "geometry"])
def test_a_critical_point_is_balanced_and_its_utility_the_geometric_mean(calibration: str) -> None:
    model, rho = pairs((2, 4, 3), (2, 3, 6), price=10), 0.02
    store, penalty = penalise(model, calibration=calibration)
    task_slope = solve_(model, store, penalty, factorise, rho, calibration)
    weighted = penalty.strength * penalty.norms(store.weight)
    first_order = penalty.group_sums(-store.weight * task_slope)
    for name, mean in balanced_utility(model, calibration).items():
        span = penalty.ranges[name]
        assert torch.allclose(weighted[span.side("a")], weighted[span.side("b")], rtol=1e-9)
        assert torch.allclose(first_order[span.side("a")], rho * mean, rtol=1e-9)


# --- proposition: calibration ---------------------------------------------------------


@pytest.mark.parametrize("calibration", ["efficiency", "geometry"])
def test_penalty_balance_is_equal_rms(calibration: str) -> None:
    """lambda_A |A| = lambda_B |B| where epsilon_A = epsilon_B, whatever the counts."""
    model = pairs((3, 4, 25), (2, 9, 1))
    store, penalty = penalise(model, calibration=calibration)
    reference.balance_(model.axis_table(), named_tensors(model), sweeps=10, rounded=False)
    weighted = penalty.strength * penalty.norms(store.weight)
    for span in penalty.ranges.values():
        assert torch.allclose(weighted[span.side("a")], weighted[span.side("b")], rtol=1e-9)


@pytest.mark.parametrize("calibration", ["efficiency", "geometry"])
def test_the_ratio_of_strengths_is_the_cross_count(calibration: str) -> None:
    _, penalty = penalise(pairs((3, 4, 25), (2, 9, 1)), calibration=calibration)
    for name, ratio in {"axis0": (25 / 4) ** 0.5, "axis1": (1 / 9) ** 0.5}.items():
        span = penalty.ranges[name]
        ratios = penalty.strength[span.side("a")] / penalty.strength[span.side("b")]
        assert ratios.tolist() == pytest.approx([ratio] * span.width)


def test_efficiency_is_one_scale_for_all_axes() -> None:
    """omega / r = epsilon at balance, on axes of different counts and prices."""
    model = pairs((3, 4, 25), (2, 9, 1), price=7)
    reference.balance_(model.axis_table(), named_tensors(model), sweeps=10, rounded=False)
    for k, (name, mean) in enumerate(balanced_utility(model).items()):
        rms = getattr(model, f"a{k}").detach().square().mean(1).sqrt()
        assert torch.allclose(mean / (7 * (k + 1)), rms, rtol=1e-9), name


def test_ranking_is_by_utility_per_price() -> None:
    model = pairs((2, 4, 4), (2, 4, 4), price=3)
    for k, scales in enumerate([(1.0, 0.2), (0.5, 0.1)]):
        getattr(model, f"a{k}").data.copy_(torch.ones(2, 4) * torch.tensor(scales)[:, None])
        getattr(model, f"b{k}").data.copy_(getattr(model, f"a{k}"))
    _, penalty = penalise(model)
    price = {name: [3 * (k + 1)] * 2 for k, name in enumerate(penalty.ranges)}
    order = ranked(balanced_utility(model), price)
    assert [(name, index) for _, name, index in order] == [
        ("axis1", 1),
        ("axis0", 1),
        ("axis1", 0),
        ("axis0", 0),
    ]


# --- failure modes of the alternatives ------------------------------------------------


def flow(form: str, rho: float, steps: int = 1000) -> tuple[Toy, float]:
    """Gradient flow on |a'b - M|^2 / 2 + rho * penalty from a tilted start.

    Returns the model and what became of log(|a| / |b|), as a multiple of where it began.
    """
    model = pairs((1, 3, 3))
    store, penalty = penalise(model, form)
    unit = model.a0.detach() / model.a0.detach().norm()
    model.a0.data.copy_(1.3 * unit)
    model.b0.data.copy_(unit / 1.3)
    target = 1.5 * unit.T @ unit

    def tilt() -> float:
        return float((model.a0.detach().norm() / model.b0.detach().norm()).log())

    before = tilt()
    for _ in range(steps):
        task = slope(store, lambda v: 0.5 * (v["a0"].T @ v["b0"] - target).square().sum())
        store.weight.sub_(0.03 * (task + rho * penalty.gradient(store.weight)))
    return model, tilt() / before


def test_symmetric_penalty_heals_an_imbalance() -> None:
    model, imbalance = flow("symmetric", rho=0.3)
    assert imbalance < 0.02
    assert model.a0.norm() > 0.5


def test_product_norm_lets_an_imbalance_grow() -> None:
    _, imbalance = flow("product_norm", rho=3.0)
    assert imbalance > 1.5


def test_product_norm_loses_its_grip_on_the_survivor() -> None:
    """With one side near zero the other is hardly pulled; the symmetric penalty pulls on."""
    model = pairs((1, 3, 3))
    model.a0.data.mul_(1e-6)
    pulls = {}
    for form in ("product_norm", "symmetric"):
        store, penalty = penalise(model, form)
        pulls[form] = store.views(penalty.gradient(store.weight))["b0"].norm().item()
    assert pulls["product_norm"] < 1e-5
    assert pulls["symmetric"] == pytest.approx(3**-0.5)


def test_one_sided_penalty_is_escaped_through_the_gauge() -> None:
    """The function stays while the unpenalised side takes over."""
    before, _ = flow("one_sided", rho=0.3, steps=100)
    after, _ = flow("one_sided", rho=0.3)
    assert after.b0.norm() > 1.3 * before.b0.norm()
    assert after.a0.norm() < before.a0.norm() / 1.3
    assert (after.a0.T @ after.b0).norm() >= (before.a0.T @ before.b0).norm()
