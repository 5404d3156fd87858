"""The options of the method, checked, and how its steps are executed."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

from gaugelasso.compress import pricing
from gaugelasso.compress.memory import DTYPES
from gaugelasso.compress.optimizers import OPTIMIZERS
from gaugelasso.compress.penalty import Calibration, Coupling, Form
from gaugelasso.compress.shape import SHAPES
from gaugelasso.compress.solver import Method
from gaugelasso.errors import UserError

# How channels are made to go: pressed towards zero, or cut where that does the least harm.
Removal = Literal["pressure", "harm"]


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
    """The `options` of a Compressor. The defaults are the method itself.

    What is None follows from the model and the length of the run. Without a length channels go by
    pressure.
    """

    lr: float | None = None
    accounting: str = "fma"
    profile: str = ""
    serving_device: str = ""
    serving_dtype: str = "bfloat16"
    serving_batch: int = 1
    serving_length: int = 0
    interval: int | None = None
    trust: float = 1.0
    multiple: int = 1
    drop_tolerance: float = 0.1
    sinkhorn_sweeps: int = 3
    powers_of_two: bool = False
    norm_rate: float = 0.2
    anchor: float = 0.01
    split_share: float = 1e-5
    exchange: int = 0
    removal: Removal | None = None
    shape: str = "free"
    penalty: Form = "symmetric"
    calibration: Calibration = "efficiency"
    coupling: Coupling = "coupled"
    solver: Method = "conservative"
    rho: float = 0.0
    loss_smoothing: float = 0.0
    optimizer: str = "muon"
    beta: float = 0.95
    beta_second: float = 0.99
    weight_decay: float = 0.0
    relative_step: float = 0.05

    def __post_init__(self) -> None:
        for key, allowed in _CHOICES.items():
            value = getattr(self, key)
            if value is None and self._is_open(key):
                continue
            if value not in list(allowed):
                names = ", ".join(allowed)
                raise UserError(f"compress.{key} = {value!r}; choose one of: {names}")
        for key in self._numbers("lr", "trust"):
            self._check(key, "a finite number above 0", lambda value: 0 < value < math.inf)
        for key in ("norm_rate", "split_share", "loss_smoothing", "beta", "beta_second"):
            self._check(key, "a number in [0, 1)", lambda value: 0 <= value < 1)
        for key in ("rho", "weight_decay", "sinkhorn_sweeps", "anchor", "drop_tolerance",
                    "relative_step"):  # fmt: skip
            self._check(key, "a number of 0 or more", lambda value: value >= 0)
        for key in self._numbers("interval", "multiple"):
            self._check(key, "a whole number of at least 1", lambda value: value >= 1)
        for key, least in {"serving_batch": 1, "serving_length": 0, "exchange": 0}.items():
            value = getattr(self, key)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise UserError(
                    f"compress.{key} = {value!r}: must be a whole number of at least {least}"
                )
        for key in self._numbers("interval", "multiple", "sinkhorn_sweeps"):
            if not isinstance(getattr(self, key), Integral):
                raise UserError(f"compress.{key} = {getattr(self, key)}: must be a whole number")

        if self.removal == "harm" and self.exchange:
            raise UserError(
                f"compress.exchange = {self.exchange}: channels are exchanged under pressure only; "
                "use compress.exchange = 0, or compress.removal = 'pressure'"
            )

        if self.shape != "free" and self.removal == "pressure":
            raise UserError(
                f"compress.shape = {self.shape!r}: under pressure every channel goes by itself; "
                "use compress.removal = 'harm', or compress.shape = 'free'"
            )

    @property
    def has_no_pressure(self) -> bool:
        """Whether nothing presses, so that nothing goes: plain training."""
        return self.removal != "harm" and self.solver == "fixed" and not self.rho

    def _numbers(self, *keys: str) -> list[str]:
        """Of these options those that are not to be chosen later."""
        return [key for key in keys if getattr(self, key) is not None or not self._is_open(key)]

    def _is_open(self, key: str) -> bool:
        """Whether an option may be chosen later."""
        return key in ("lr", "interval", "removal")

    def _check(self, key: str, wanted: str, fits: Callable[[float], bool]) -> None:
        """UserError unless the option is a number that fits; NaN fits nothing."""
        value = getattr(self, key)
        if not isinstance(value, Real) or not fits(float(value)):
            raise UserError(f"compress.{key} = {value!r}: must be {wanted}")


@dataclass(frozen=True)
class RunOptions(CompressorOptions):
    """Options of which none is open: the [compress] section of a config."""

    lr: float = 1e-3
    interval: int = 100
    removal: Removal = "pressure"

    @property
    def step_norm_rate(self) -> float:
        """The share that slow weights follow in one step; `norm_rate` is that of one interval."""
        return 1 - (1 - self.norm_rate) ** (1 / self.interval)

    def _is_open(self, key: str) -> bool:
        return False


_CHOICES: dict[str, Collection[str]] = {
    "accounting": [*pricing.ACCOUNTINGS, "bytes", "latency"],
    "serving_dtype": DTYPES,
    "penalty": get_args(Form),
    "calibration": get_args(Calibration),
    "coupling": get_args(Coupling),
    "solver": get_args(Method),
    "optimizer": OPTIMIZERS,
    "removal": get_args(Removal),
    "shape": SHAPES,
}
