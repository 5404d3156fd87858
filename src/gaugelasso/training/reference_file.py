"""reference.json: the loss of the full model that a run's target refers to, and its origin."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gaugelasso.config import Config
from gaugelasso.errors import UserError
from gaugelasso.runs.folder import REFERENCE_FILE
from gaugelasso.runs.reading import exists, read_json

Origin = Literal["measured", "estimated", "given"]


@dataclass(frozen=True)
class Reference:
    """The full model: its loss on selection data, and whether it stands for this run's own.

    `differs` are the settings in which its run differs from this one; it is "estimated" then.
    """

    loss: float
    origin: Origin
    folder: str | None = None
    differs: Sequence[str] = ()
    training_fma: float | None = None

    def named(self, above_full: float) -> str:
        """The loss that follows, as in: named 0.0512 = 1.02 x 0.0502, measured in runs/x."""
        factor = 1 + above_full
        where = "" if self.folder is None else f" in {self.folder}"
        why = f" (other {', '.join(self.differs)})" if self.differs else ""
        product = f"{factor * self.loss:.4g} = {factor:g} x {self.loss:.4g}"
        return f"named {product}, {self.origin}{where}{why}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "differs": list(self.differs)}


def load_reference(run: Path) -> Reference | None:
    """What an earlier start of the run found; None if it did not get that far."""
    path = run / REFERENCE_FILE
    if not exists(path):
        return None
    data = read_json(path)
    try:
        loss, known = float(data["loss"]), data["training_fma"]
        if not 0 < loss < math.inf or data["origin"] not in ("measured", "estimated"):
            raise ValueError
        work = None if known is None else float(known)
        differs = tuple(map(str, data["differs"]))
        return Reference(loss, data["origin"], str(data["folder"]), differs, work)
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{str(path)!r}: not the reference of a run; remove the file to measure it again"
        ) from None


def reference_entry(config: Config, run: Path) -> dict[str, Any]:
    """The entry of summary.json; empty if the target does not refer to a full model."""
    above, loss = config.target.above_full, config.target.reference_loss
    if above is None or loss is None:
        return {}
    found = load_reference(run) or Reference(loss, "given")
    return {"reference": {**found.to_dict(), "named": found.named(above)}}
