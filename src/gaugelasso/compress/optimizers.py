"""The optimizers by name: the choices of the option `optimizer`."""

from collections.abc import Callable
from functools import partial

from gaugelasso.compress.flat_optimizer import FlatOptimizer
from gaugelasso.compress.optim import CoupledOptimizer

# Each is called with a store, the table's `matrices`, and the options beta, beta_second and
# weight_decay by name.
OPTIMIZERS: dict[str, Callable[..., FlatOptimizer]] = {
    "muon": partial(CoupledOptimizer, kind="muon"),
    "adam": partial(CoupledOptimizer, kind="adam"),
}
