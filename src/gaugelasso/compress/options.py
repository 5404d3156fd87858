"""The options of the method, checked, and how its steps are executed."""

import math
from dataclasses import dataclass
from typing import Literal

from gaugelasso.compress import pricing
from gaugelasso.compress.penalty import Calibration, Form
from gaugelasso.compress.solver import Method
from gaugelasso.errors import UserError


@dataclass(frozen=True)
class ExecutionOptions:
    """How a training step is executed; changes no result beyond rounding.

    - graph: repeat the balance as a CUDA graph, where the model is on a GPU
    - microbatches: how many micro-batches this rank has in a step
    - canonical: sum micro-batches in an order that does not depend on the number of ranks
    """

    graph: bool = True
    microbatches: int = 1
    canonical: bool = False


@dataclass(frozen=True)
class CompressorOptions:
    """The [compress] section of a config, and the `options` of a Compressor.

    The defaults are the method itself.
    """

    lr: float = 1e-3
    accounting: str = "fma"
    interval: int = 100
    trust: float = 1.0
    multiple: int = 1
    drop_tolerance: float = 0.1
    sinkhorn_sweeps: int = 3
    powers_of_two: bool = False
    norm_rate: float = 0.2
    anchor: float = 0.01
    split_share: float = 1e-5
    penalty: Form = "symmetric"
    calibration: Calibration = "efficiency"
    solver: Method = "conservative"
    rho: float = 0.0
    loss_smoothing: float = 0.0
    optimizer: Literal["muon", "adam"] = "muon"
    beta: float = 0.95
    beta_second: float = 0.99
    weight_decay: float = 0.0
    relative_step: float = 0.05

    def __post_init__(self) -> None:
        for key in ("lr", "trust"):
            if not 0 < getattr(self, key) < math.inf:
                raise UserError(f"compress.{key} = {getattr(self, key)}: must be more than 0")
        for key in ("norm_rate", "split_share", "loss_smoothing", "beta", "beta_second"):
            if not 0 <= getattr(self, key) < 1:
                raise UserError(f"compress.{key} = {getattr(self, key)}: must be in [0, 1)")
        for key in (
            "rho",
            "weight_decay",
            "sinkhorn_sweeps",
            "anchor",
            "drop_tolerance",
            "relative_step",
        ):
            if getattr(self, key) < 0:
                raise UserError(f"compress.{key} = {getattr(self, key)}: must not be negative")
        for key in ("interval", "multiple"):
            if getattr(self, key) < 1:
                raise UserError(f"compress.{key} = {getattr(self, key)}: must be at least 1")
        if self.accounting not in pricing.ACCOUNTINGS:
            known = ", ".join(pricing.ACCOUNTINGS)
            raise UserError(f"compress.accounting = {self.accounting!r}; choose one of: {known}")
