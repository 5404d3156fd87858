"""Formats numbers for readers: counts, ratios, times, and means over seeds.

A value that is missing or not finite becomes a dash.
"""

import math
import statistics
from collections.abc import Callable, Sequence

DASH = "—"

Format = Callable[[float], str]


def count(value: float) -> str:
    """A count, or the mean of several: one decimal only below 1,000."""
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:,.1f}"


def width_range(widths: Sequence[int]) -> str:
    """The smallest and the largest width: 4–16."""
    low, high = min(widths), max(widths)
    return f"{high:,}" if low == high else f"{low:,}–{high:,}"


def short(value: float) -> str:
    """Three digits and a letter: 1500 -> 1.5k."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def ratio(value: float) -> str:
    """11.0×, with three digits."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}×"


def figure(value: float) -> str:
    """A loss or a similar figure, with four digits."""
    return f"{value:.4g}"


def seconds(value: float) -> str:
    if value < 120:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def milliseconds(value: float) -> str:
    return f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def is_accuracy(metric: str) -> bool:
    """Whether a metric of this name is a share of correct answers, where 1 is perfect."""
    return any(word in metric for word in ("accuracy", "match"))


def metric_format(name: str, digits: int = 2) -> Format:
    """The format for values of the metric of this name; accuracies are in per cent."""
    return (lambda value: f"{value:.{digits}%}") if is_accuracy(name) else figure


def known(value: float | None, form: Format) -> str:
    return DASH if value is None or not math.isfinite(value) else form(value)


def mean_std(values: Sequence[float | None], form: Format) -> tuple[str, str]:
    """Mean and sample standard deviation; dashes if any value is missing."""
    present = [v for v in values if v is not None and math.isfinite(v)]
    if not present or len(present) < len(values):
        return DASH, DASH
    spread = form(statistics.stdev(present)) if len(present) > 1 else DASH
    return form(statistics.fmean(present)), spread


def over_seeds(values: Sequence[float | None], form: Format) -> str:
    """Mean ± standard deviation, or the value alone where all seeds have the same."""
    if len(set(values)) == 1:
        return known(values[0], form)
    mean, spread = mean_std(values, form)
    return mean if spread == DASH else f"{mean} ± {spread}"
