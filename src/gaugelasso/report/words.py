"""Numbers and sentences as a reader wants them; a figure that is not known is a dash."""

import math
import statistics
from collections.abc import Callable, Sequence

from gaugelasso.report.data import Run, outcome

DASH = "—"

Format = Callable[[float], str]


def count(value: float) -> str:
    """A number of things, or the mean of a few."""
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:,.1f}"


def width_range(widths: Sequence[int]) -> str:
    """The least and the most of some widths: 4–16."""
    low, high = min(widths), max(widths)
    return f"{high:,}" if low == high else f"{low:,}–{high:,}"


def short(value: float) -> str:
    """Three figures and a letter: 1500 -> 1.5k."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def ratio(value: float) -> str:
    """11.0×, with three figures."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}×"


def figure(value: float) -> str:
    """A loss or the like, four figures."""
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
    """Whether a metric of this name is a share, 1 being perfect."""
    return any(word in metric for word in ("accuracy", "match"))


def metric_format(name: str, digits: int = 2) -> Format:
    """How values of the metric of this name are written: shares of what is right in per cent."""
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
    """One value, or one that all seeds share, as it is; several as mean ± standard deviation."""
    if len(set(values)) == 1:
        return known(values[0], form)
    mean, spread = mean_std(values, form)
    return mean if spread == DASH else f"{mean} ± {spread}"


def headline(runs: Sequence[Run]) -> str:
    """What came out, in one sentence: work before and after, ratio, metric."""
    ends = [outcome(run) for run in runs]
    before = statistics.fmean(end.fma_initial for end in ends)
    after = statistics.fmean(end.fma_final for end in ends)
    compression = statistics.fmean(end.compression for end in ends)
    size = f"{ratio(compression)} smaller" if compression > 1 else "not smaller"
    text = f"{count(before)} → {count(after)} FMA per token: {size}"
    name = runs[0].metric_name
    metric, _ = mean_std([end.metric for end in ends], metric_format(name))
    if metric != DASH:
        text += f" at {metric} {name}"
    return text if len(runs) == 1 else f"{text} (means of {len(runs)} seeds)"


def verdict(runs: Sequence[Run]) -> tuple[bool | None, str]:
    """Whether the loss target was held at the end (None: not known yet), and the sentence."""
    target = f"the loss target of {runs[0].loss_target:g}"
    ends = [outcome(run) for run in runs]
    going = sum(not end.finished for end in ends)
    if going:
        if len(runs) == 1:
            planned = runs[0].config["train"]["steps"]
            return None, f"Not finished: step {ends[0].steps:,} of at most {planned:,}."
        return None, f"{going} of {len(runs)} runs are not finished; figures are as of now."
    held = [end.loss is not None and end.loss <= runs[0].loss_target for end in ends]
    if len(runs) > 1:
        return all(held), f"{sum(held)} of {len(runs)} seeds end within {target} on held-out data."
    loss = known(ends[0].loss, figure)
    if ends[0].reached_step is None:
        return False, f"The training loss never came down to {target}; held-out loss {loss}."
    place = "within" if held[0] else "above"
    return held[0], f"Held-out loss {loss}, {place} {target}."
