"""What the numbers of an accounting are numbers of, for messages, tables and pictures."""

from collections.abc import Mapping
from typing import Any

_UNITS = {"bytes": "bytes", "latency": "ms"}


def unit(accounting: str) -> str:
    """The unit of a model's cost: FMA per token unless the accounting is another kind."""
    return _UNITS.get(accounting, "FMA per token")


def counts_work(accounting: str) -> bool:
    """Whether the accounting counts work per token."""
    return accounting not in _UNITS


def training_accounting(accounting: str) -> str:
    """What training work is counted by: FMA where the accounting counts no work."""
    return accounting if counts_work(accounting) else "fma"


def final_work(summary: Mapping[str, Any]) -> float:
    """Work per token of a run's final model; in FMA if its accounting counts no work."""
    counted = counts_work(str(summary.get("accounting")))
    return float(summary["fma_final"] if counted else summary["costs"]["fma"])


def noun(accounting: str) -> str:
    """The same in a narrow column."""
    return _UNITS.get(accounting, "FMA")


def gained(accounting: str) -> str:
    """What a model of a lower cost is. Milliseconds are sums of a table, not a measurement."""
    return "faster by the table" if accounting == "latency" else "smaller"


def number(value: float, accounting: str) -> str:
    """A cost as text: whole numbers, and milliseconds with four digits."""
    return f"{value:.4g}" if accounting == "latency" else f"{value:,.0f}"


def amount(value: float, accounting: str) -> str:
    """A cost with its unit."""
    return f"{number(value, accounting)} {unit(accounting)}"
