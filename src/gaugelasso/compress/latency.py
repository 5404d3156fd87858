"""The accounting `latency`: milliseconds of the served model, by the table of a profile.

Counts are at the sizes that the device computes, padded to its multiples. Prices are differences
of the times between those, so that they change little from one cut to the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gaugelasso.axes import AxisTable, Operation, Size, Tensors
from gaugelasso.compress.pricing import Term, Value, Widths
from gaugelasso.compress.time_table import (
    TimeTable,
    Timing,
    preferred_multiple,
    rounded_up,
)
from gaugelasso.errors import UserError


@dataclass(frozen=True)
class Timed(Term):
    """The time of one operation."""

    axes: tuple[str, ...]
    sizes: tuple[Size, ...]
    timing: Timing
    preferred: Mapping[str, int]
    fixed: float = 0.0
    full: Mapping[str, int] = field(default_factory=dict)

    def work(self, widths: Widths) -> Value:
        """The time at padded sizes; nothing for an operation that is gone."""
        wide = {name: rounded_up(widths[name], self.preferred.get(name, 1)) for name in self.axes}
        sizes = self._sizes(wide)
        padded = map(rounded_up, sizes, self.timing.multiples)
        alive: Any = 1
        for size in sizes:
            alive = alive * (size > 0)
        value: Value = alive * self.timing.at(list(padded))
        return value

    def smooth(self, widths: Widths) -> Value:
        """Linear between the measured sizes, which are multiples; `fixed` is the rest."""
        value: Value = self.timing.at(self._sizes(widths))
        return value

    def _sizes(self, widths: Widths) -> list[Any]:
        return [at_widths(size, widths) for size in self.sizes]


def at_widths(size: Size, widths: Widths) -> Any:
    """A size of an operation, at these widths."""
    return size.constant + sum(factor * widths[name] for name, factor in size.widths)


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one pass, or of one token, as the table's circumstances say."""

    table: TimeTable
    name: str = "latency"
    unit: str = "ms"

    def terms(self, table: AxisTable, tensors: Tensors) -> list[Timed]:
        widths, preferred = table.widths(tensors), self.preferred(table)
        found = []
        for operation in check_operations(table):
            largest = [at_widths(size, widths) for size in operation.sizes]
            timing = self.table.find(operation.kind, operation.fixed)
            timing.check_covers(largest)
            full = {
                name: grid[-1] // factor
                for size, grid in zip(operation.sizes, timing.sizes, strict=True)
                # Of several axes that make up one size, the width of each is not known.
                for name, factor in (size.widths if len(size.widths) == 1 else ())
            }
            term = (operation.axes, operation.sizes, timing, preferred, timing.fewest, full)
            found.append(Timed(*term))
        return found

    def preferred(self, table: AxisTable) -> dict[str, int]:
        """The largest multiple that a size asks for; an axis with position maps may have any."""
        linked = {axis.name for axis in table.axes if axis.linked()}
        found: dict[str, int] = {}
        for operation in check_operations(table):
            timing = self.table.find(operation.kind, operation.fixed)
            for size, multiple in zip(operation.sizes, timing.multiples, strict=True):
                # Of several axes that make up one size, each may have any width.
                for name, factor in size.widths if len(size.widths) == 1 else ():
                    grain = preferred_multiple(multiple, factor)
                    if name not in linked and grain > 1:
                        found[name] = max(grain, found.get(name, 1))
        return found


def check_operations(table: AxisTable) -> tuple[Operation, ...]:
    """The operations that a model declares; UserError if there are none."""
    if not table.operations:
        raise UserError(
            "compress.accounting = 'latency': the model does not say what it does when it is "
            "served; declare AxisTable(operations=...), or use the accounting fma or bytes"
        )
    return table.operations
