"""Milliseconds that `bench RUN --inference` measured, from the serving.json of a run folder."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from gaugelasso.report.run import Run

Row = dict[str, Any]


class Measured(NamedTuple):
    """Milliseconds of the model before and after compression; None where it was not measured."""

    before: float | None
    after: float


def measured(run: Run) -> dict[str, Measured]:
    """What was served and where -> its milliseconds; of the inference form where there is one."""
    found: dict[str, Measured] = {}
    rows = [row for row in run.serving if row["model"] == "compressed"]
    for row in sorted(rows, key=lambda row: row["form"] == "inference"):  # the last one counts
        ancestors = [other for other in run.serving if _is_ancestor(other, row)]
        for figure, batch in (("latency_ms", 1), ("batch_ms", row["batch"])):
            before = ancestors[0][figure] if ancestors else None
            found[_label(row, batch)] = Measured(before, row[figure])
    return found


def served_as(runs: Sequence[Run]) -> list[str]:
    """What was measured of any of the runs, each once."""
    return list(dict.fromkeys(label for run in runs for label in measured(run)))


def before(run: Run, label: str) -> float | None:
    found = measured(run).get(label)
    return found.before if found else None


def after(run: Run, label: str) -> float | None:
    found = measured(run).get(label)
    return found.after if found else None


def column(label: str) -> str:
    """The head of a column, or the name of a row."""
    return f"measured ms ({label})"


def _is_ancestor(other: Row, row: Row) -> bool:
    """Whether a row is that of the ancestor, measured in turns with `row`."""
    same = ("form", "device", "batch", "length", "decode")
    return other["model"] == "ancestor" and all(other[key] == row[key] for key in same)


def _label(row: Row, batch: int) -> str:
    sizes = f"{batch}×{row['length']} tokens"
    if row["decode"]:
        sizes = f"a step of {batch} at {row['length']}"
    return f"{sizes}, {row['at']['hardware']}"
