"""A cost of a model as text: what the numbers of a cost model are numbers of is its unit."""


def number(value: float, unit: str) -> str:
    """Whole numbers, and milliseconds with four digits."""
    return f"{value:.4g}" if unit == "ms" else f"{value:,.0f}"


def amount(value: float, unit: str) -> str:
    """A cost with its unit."""
    return f"{number(value, unit)} {unit}"
