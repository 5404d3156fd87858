"""The [target] section: what the final model must have."""

import math
from dataclasses import dataclass
from typing import Literal

from gaugelasso.errors import UserError

TargetKind = Literal["loss", "above_full", "metric", "fma"]
# The keys that name a figure of the final model. One is given, or `loss` and `metric` together.
FIGURES = ("loss", "above_full", "metric")
# The loss of a config that names no target at all.
DEFAULT_LOSS = 0.05


@dataclass(frozen=True)
class TargetConfig:
    """[target]: what the final model must have: a loss, a metric, both, or a work per token.

    One of `loss`, `above_full` and `metric` is given, or `loss` and `metric`, which must both hold,
    or none of them but `fma`.
    `above_full` names a loss relative to `reference_loss`, which a run measures. With `hold`
    "pressed", `loss` is the loss to press towards at a constant rate, as in the paper; the anneal
    then ends below it.
    """

    loss: float | None = None
    above_full: float | None = None
    reference: str | None = None
    reference_loss: float | None = None
    metric: float | None = None
    hold: Literal["final", "pressed"] = "final"
    fma: float = 0.0

    def __post_init__(self) -> None:
        for key in (*FIGURES, "reference_loss"):
            value = getattr(self, key)
            if value is not None and not math.isfinite(value):
                raise UserError(f"target.{key} = {value}: must be a finite number")
        if not 0 <= self.fma < math.inf:
            raise UserError(
                f"target.fma = {self.fma}: must be 0 (no work target) or a finite number above 0"
            )
        self._check_reference()
        given = self._given()
        if len(given) > 1 and given != ["loss", "metric"]:
            keys = " and ".join(f"target.{key} = {getattr(self, key):g}" for key in given)
            raise UserError(
                f"{keys}: give one of them; only target.loss and target.metric go together"
            )
        if given not in ([], ["loss"]):
            self._check_final(given[-1])
        if not given and (self.hold == "pressed" or not self.fma):
            object.__setattr__(self, "loss", DEFAULT_LOSS)

    def _given(self) -> list[str]:
        return [key for key in FIGURES if getattr(self, key) is not None]

    def _check_final(self, key: str) -> None:
        """UserError if a key that needs a final model, and no work target, has them not."""
        if self.hold == "pressed":
            raise UserError(
                f"target.{key} is a property of the final model; remove target.hold = 'pressed', "
                f"or remove target.{key} and name the pressed loss with target.loss"
            )
        if self.fma:
            raise UserError(
                f"target.{key} and target.fma = {self.fma:g}: give one of them; target.fma may "
                "join target.loss alone"
            )

    def _check_reference(self) -> None:
        if self.above_full is not None and self.above_full < 0:
            raise UserError(
                f"target.above_full = {self.above_full:g}: must be 0 or more, the share by which "
                "the loss may be above that of the full model"
            )
        for key in ("reference", "reference_loss"):
            if self.above_full is None and getattr(self, key) is not None:
                raise UserError(
                    f"target.{key} = {getattr(self, key)!r} is the full model for "
                    "target.above_full, which is not given"
                )
        if self.reference_loss is not None and self.reference_loss <= 0:
            raise UserError(
                f"target.reference_loss = {self.reference_loss:g}: must be above 0, because "
                "target.above_full is a share of it; name target.loss instead"
            )

    @property
    def kind(self) -> TargetKind:
        """Which key says what is wanted."""
        if self.metric is not None:
            return "metric"
        if self.above_full is not None:
            return "above_full"
        return "fma" if self.loss is None else "loss"

    @property
    def pressed(self) -> float:
        """The loss to press towards, with `hold` "pressed"."""
        assert self.loss is not None  # __post_init__ sees to it
        return self.loss

    @property
    def named(self) -> float | None:
        """The loss that is named; None where it is another figure, or not measured yet."""
        if self.above_full is None or self.reference_loss is None:
            return self.loss
        return (1 + self.above_full) * self.reference_loss
