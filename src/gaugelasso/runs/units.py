"""What the numbers of an accounting are numbers of, for messages, tables and pictures."""

_UNITS = {"bytes": "bytes", "latency": "ms"}


def unit(accounting: str) -> str:
    """The unit of a model's cost: FMA per token unless the accounting is another kind."""
    return _UNITS.get(accounting, "FMA per token")


def noun(accounting: str) -> str:
    """The same in a narrow column."""
    return _UNITS.get(accounting, "FMA")


def number(value: float, accounting: str) -> str:
    """A cost as text: whole numbers, and milliseconds with four digits."""
    return f"{value:.4g}" if accounting == "latency" else f"{value:,.0f}"


def amount(value: float, accounting: str) -> str:
    """A cost with its unit."""
    return f"{number(value, accounting)} {unit(accounting)}"
