"""What a compression led to. A plain record; computes nothing of its own."""

from dataclasses import dataclass, field
from typing import Any, Literal

from gaugelasso.errors import UserError


class TargetMissed(UserError):
    """The final model does not have the loss that was named."""


class TargetMissedWarning(UserWarning):
    """The final model does not have the loss that was named."""


@dataclass(frozen=True)
class Result:
    """The outcome of a compression: `held` says whether the final loss is within the named one.

    `measured_on` says where `loss` comes from: "held-out data" if the compressor had an
    `evaluate` function, else "the last training batches".
    """

    held: bool
    loss: float
    loss_target: float
    measured_on: Literal["held-out data", "the last training batches"]
    steps: int
    fma_initial: float
    fma: float
    parameters_initial: int
    parameters: int
    widths: dict[str, int]
    trials: list[dict[str, Any]] = field(default_factory=list, repr=False)

    @property
    def compression(self) -> float:
        """Work per token before, divided by that after."""
        return self.fma_initial / self.fma if self.fma else float("inf")

    def __str__(self) -> str:
        verdict = "held" if self.held else "MISSED"
        return (
            f"{self.fma_initial:,.0f} -> {self.fma:,.0f} FMA per token ({self.compression:.1f}x), "
            f"{self.parameters_initial:,} -> {self.parameters:,} parameters; "
            f"loss {self.loss:.4g} on {self.measured_on}, named {self.loss_target:g}: {verdict}"
        )

    def missed_message(self) -> str:
        """What to do about a missed target."""
        losses = [self.loss, *(row["selection_loss"] for row in self.trials)]
        best = min(loss for loss in losses if loss is not None)
        unchanged = self.fma >= 0.999 * self.fma_initial
        size = "the full model" if unchanged else f"the model of {self.fma:,.0f} FMA per token"
        return (
            f"loss_target = {self.loss_target:g} was missed: {size} ends at a loss of "
            f"{self.loss:.4g} after {self.steps:,} steps. The best loss on the way was {best:.4g}; "
            "name a loss above that, or give more steps"
        )
