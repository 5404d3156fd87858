"""Models of two or three tensors, small enough to solve exactly."""

import torch
from torch import Tensor, nn

from gaugelasso.axes import Axis, AxisTable, Compressible, Cost, Slot, named_tensors
from gaugelasso.compress import reference
from gaugelasso.compress.flat import FlatStore
from gaugelasso.compress.penalty import Calibration, Form, Penalty
from gaugelasso.compress.pricing import ACCOUNTINGS, prices


class Toy(Compressible):
    """Named tensors and their table, in float64."""

    def __init__(self, table: AxisTable, **tensors: Tensor):
        super().__init__()
        self.declared = table
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.double()))

    def axis_table(self) -> AxisTable:
        return self.declared


def exact(values: float | list[float]) -> Tensor:
    """A float64 tensor of just these numbers."""
    return torch.tensor(values, dtype=torch.float64)


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pairs(*shapes: tuple[int, int, int], price: int = 1, seed: int = 0) -> Toy:
    """Axis k couples `a{k}` [width, n_a] and `b{k}` [width, n_b]: disjoint groups.

    An index of axis k costs price * (k + 1).
    """
    axes, fixed, costs, tensors = [], [], [], {}
    for k, (width, n_a, n_b) in enumerate(shapes):
        a, b = f"a{k}", f"b{k}"
        tensors[a] = gaussian(width, n_a, seed=seed + 2 * k)
        tensors[b] = gaussian(width, n_b, seed=seed + 2 * k + 1)
        axes.append(Axis(f"axis{k}", "j", (Slot(a),), (Slot(b),)))
        fixed += [Slot(a, 1), Slot(b, 1)]
        costs.append(Cost("matmul", price * (k + 1), (f"axis{k}",)))
    return Toy(AxisTable(tuple(axes), tuple(fixed), costs=tuple(costs)), **tensors)


def chain(n: int, j: int, k: int, m: int, seed: int = 0) -> Toy:
    """first [n, j] @ middle [j, k] @ last [k, m]: every element of `middle` is in two groups."""
    table = AxisTable(
        axes=(
            Axis("j", "j", (Slot("first", 1),), (Slot("middle", 0),)),
            Axis("k", "k", (Slot("middle", 1),), (Slot("last", 0),)),
        ),
        fixed=(Slot("first", 0), Slot("last", 1)),
        matrices={"first": 1, "middle": 1, "last": 1},
        costs=(
            Cost("matmul", n, ("j",)),
            Cost("matmul", 1, ("j", "k")),
            Cost("matmul", m, ("k",)),
        ),
    )
    return Toy(
        table,
        first=gaussian(n, j, seed=seed),
        middle=gaussian(j, k, seed=seed + 1),
        last=gaussian(k, m, seed=seed + 2),
    )


def penalise(
    model: Toy, form: Form = "symmetric", calibration: Calibration = "efficiency"
) -> tuple[FlatStore, Penalty]:
    """The model on flat storage and its penalty, at the `fma` prices of its table."""
    table, tensors = model.axis_table(), named_tensors(model)
    table.check(tensors)
    price = prices(table, ACCOUNTINGS["fma"], tensors)
    store = FlatStore(model, table)
    return store, Penalty(table, named_tensors(model), store, price, form, calibration)


def value(model: Toy, form: Form = "symmetric", calibration: Calibration = "efficiency") -> Tensor:
    """The reference value of the penalty at the model's own weights."""
    table, tensors = model.axis_table(), named_tensors(model)
    price = prices(table, ACCOUNTINGS["fma"], tensors)
    return reference.penalty_value(table, tensors, price, form, calibration).detach()


def balanced_utility(model: Toy, calibration: Calibration = "efficiency") -> dict[str, Tensor]:
    """GM_j of every index at the model's own weights."""
    table, tensors = model.axis_table(), named_tensors(model)
    price = prices(table, ACCOUNTINGS["fma"], tensors)
    return reference.balanced_utility(table, tensors, price, calibration)
