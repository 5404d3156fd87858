"""The result of `compress`: the original beside the compressed model, and what follows from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaugelasso.cli.compression_options import Share
from gaugelasso.cli.compression_original import Original
from gaugelasso.cli.compression_plan import Plan
from gaugelasso.errors import UserError
from gaugelasso.report.layout import Table
from gaugelasso.runs.reading import read_json
from gaugelasso.runs.units import number, unit

# The share of the allowance from which on it counts as used.
_USED = 2 / 3


@dataclass(frozen=True)
class Result:
    """The original beside the model of a finished run.

    `unit` is that of the losses, `contexts` are those of the original and of the result, and
    `given` is the number of parameters of the model that was given, before its import.
    """

    original: Original
    summary: dict[str, Any]
    unit: str
    contexts: tuple[int, int]
    given: int

    @classmethod
    def load(cls, original: Original, run: Path, chosen: Plan, given: int) -> "Result":
        path = run / "summary.json"
        summary = read_json(path)
        try:
            found = summary["loss"], summary["metric"]["value"]
        except (KeyError, TypeError):
            raise UserError(f"{str(path)!r}: not the summary of a run") from None
        if not all(isinstance(value, float) for value in found):
            raise UserError(f"{str(path)!r}: the final model has no finite loss on test data")
        return cls(original, summary, chosen.task.loss_unit, chosen.contexts, given)

    @property
    def loss(self) -> float:
        return float(self.summary["loss"])

    @property
    def above(self) -> float:
        """The share by which the loss on test data is above the original's."""
        return self.loss / self.original.test.loss - 1

    @property
    def is_smaller(self) -> bool:
        """Whether anything was cut."""
        return bool(self.summary["fma_final"] < self.summary["fma_initial"])

    def unused(self, share: Share) -> str | None:
        """What a result that holds has left of its allowance; None if little is left."""
        if self.above >= _USED * share.value and self.is_smaller:
            return None
        cut = "" if self.is_smaller else "nothing was cut, and "
        return (
            f"{cut}the allowance was not used up: {self.above:+.1%} loss, "
            f"{share.value:+.1%} allowed; more --steps may cut more"
        )

    def table(self) -> Table:
        test, bits = self.original.test, self.summary["metric"]["value"]
        rows = [
            *self._sizes(),
            [self.unit, f"{test.loss:.4f}", f"{self.loss:.4f}", f"{self.above:+.2%}"],
            [
                self.original.metric,
                f"{test.bits:.4f}",
                f"{bits:.4f}",
                f"{bits / test.bits - 1:+.2%}",
            ],
        ]
        headers = ["", "original", "compressed", "change"]
        return Table("Result", headers, rows, "losses on test data, which decided nothing")

    def _sizes(self) -> list[list[str]]:
        """Context, work and parameters; labels say in which form the original is counted."""
        summary, (before, after) = self.summary, self.contexts
        accounting = summary["accounting"]
        work = [summary[f"fma_{when}"] for when in ("initial", "final")]
        parameters = [summary[f"parameters_{when}"] for when in ("initial", "final")]
        context = ["context in tokens", f"{before:,}", f"{after:,}", ""]
        counted, given, counted_here = unit(accounting), [], "parameters"
        if before != after:
            context[-1], counted = "cut", f"{counted}, context {after:,}"
        if self.given != parameters[0]:
            given = [["parameters of MODEL", f"{self.given:,}", "", ""]]
            counted_here = "parameters in the run"
        return [
            context,
            [counted, *(number(each, accounting) for each in work), _ratio(*work)],
            *given,
            [counted_here, *(f"{each:,}" for each in parameters), _ratio(*parameters)],
        ]


def _ratio(before: float, after: float) -> str:
    if after >= before:
        return "nothing was cut"
    return f"{before / after:.2f}x less" if after else "none left"
