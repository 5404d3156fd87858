"""Tables of a benchmark: the parts of a training step, and how fast models are served."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from gaugelasso.report.formats import DASH, count, known, milliseconds, ratio, short
from gaugelasso.report.layout import Table, render

Rows = Mapping[str, Mapping[str, Any]]

_PARTS = {
    "whole step": "ms",
    "whole step, widths not rounded": "ms_exact",
    "forward": "forward_ms",
    "backward": "backward_ms",
    "optimizer": "optimizer_ms",
    "penalty, solver, slow weights": "machinery_ms",
    "whole step without compression": "baseline_ms",
    "whole step without a graph": "eager_ms",
    "structural event": "event_ms",
    "two steps after it, with new graphs": "resumed_ms",
    "the two after these": "replayed_ms",
}
_SERVED = {"latency": "latency_ms", "throughput": "batch_ms"}
# Repeated too few times for meaningful quartiles.
_FEW = ("eager_ms", "event_ms", "resumed_ms", "replayed_ms")
# From this relative spread on, another process probably uses the machine.
BUSY = 0.1
# What the sum of a table and the whole model may differ by: a share of the longer time, and the
# milliseconds that lie between the operations of a small model.
_APART, _BETWEEN_MS = 0.25, 1.0


def print_bench(rows: Rows, console: Console) -> None:
    """Print the parts of a step, or the models side by side, depending on the rows."""
    served = {name: row for name, row in rows.items() if "latency_ms" in row}
    if served:
        for table in serving_tables(served):
            render(table, console)
    for name, row in rows.items():
        if name not in served:
            render(step_table(name, row), console)


def busy(rows: Rows) -> str:
    """A warning if repetitions disagree; empty if they agree."""
    spreads = {
        f"{name}, {what}": _spread(row, key)
        for name, row in rows.items()
        for what, key in (_PARTS | _SERVED).items()
        if key in row["quartiles"] and key not in _FEW
    }
    worst, spread = max(spreads.items(), key=lambda item: item[1], default=("", 0.0))
    if spread < BUSY:
        return ""
    return f"repetitions disagree ({worst}: {_percent(spread)}). Is the machine busy? Run it again"


def apart(table_ms: float, whole_ms: float) -> str:
    """A warning if a model takes another time than the sum of its operations; empty if not."""
    difference = abs(table_ms - whole_ms)
    if difference <= max(_BETWEEN_MS, _APART * max(table_ms, whole_ms)):
        return ""
    return (
        f"the table and the whole model disagree ({milliseconds(table_ms)} and "
        f"{milliseconds(whole_ms)}). Is the machine busy? Run it again"
    )


def _spread(row: Mapping[str, Any], key: str) -> float:
    """Half the interquartile range, relative to the median."""
    low, high = row["quartiles"][key]
    return float((high - low) / 2 / row[key])


def _percent(spread: float) -> str:
    return f"±{100 * spread:.0f}%"


def step_table(name: str, row: Mapping[str, Any]) -> Table:
    whole = row["ms"]
    shown = {
        part: key
        for part, key in _PARTS.items()
        if key in row and (row["graph"] or key != "eager_ms")
    }
    lines = [
        [part, milliseconds(row[key]), _between(row, key), f"{100 * row[key] / whole:.0f}%"]
        for part, key in shown.items()
    ]
    work = f"{count(row['fma'])} FMA per token"
    if row["multiple"] > 1:
        work += (
            f" with widths rounded up to multiples of {row['multiple']}, "
            f"{count(row['fma_exact'])} without"
        )
    # Rows of older files have events without a cut.
    cut = 1 - row.get("fma_after_events", row["fma"]) / row["fma"]
    note = (
        f"Compression, including a step's share of an event, adds "
        f"{100 * row['machinery_share']:.0f}% to a step without compression; all events cut "
        f"{100 * cut:.0f}% of the work. "
        f"{count(row['tokens_per_s'])} tokens/s; {row['tflops']:.3g} TFLOP/s of "
        f"{row['matrix_tflops']:.3g} for a large matrix product on this device; peak memory "
        f"{row['peak_gib']:.2f} GiB; {work}; "
        f"{count(row['parameters'])} parameters."
    )
    return Table(name, ["part", "median", "quartiles", "share of the step"], lines, note)


def _between(row: Mapping[str, Any], key: str) -> str:
    """The quartiles; a dash for parts that are differences or were timed only a few times."""
    if key not in row["quartiles"] or key in _FEW:
        return DASH
    low, high = map(milliseconds, row["quartiles"][key])
    return f"{low.removesuffix(' ms')} to {high}"


def serving_tables(rows: Rows) -> list[Table]:
    """One table for each device: it has room for no more columns on a narrow terminal."""
    devices = dict.fromkeys(row["device"] for row in rows.values())
    return [
        _serving_table(device, [row for row in rows.values() if row["device"] == device])
        for device in devices
    ]


def _serving_table(device: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    ancestors = {_form(row): row for row in rows if row["model"] == "ancestor"}
    lines = [
        [
            row["model"],
            {"inference": "serve", "training": "train"}[_form(row)],
            short(row["fma"]),
            known(row.get("weight_bytes"), short),
            known(row.get("cache_bytes_per_token"), short),
            _ms(row["latency_ms"]),
            _with_spread(row, "batch_ms"),
            ratio(row["tokens_per_s"] / ancestors[_form(row)]["tokens_per_s"]),
        ]
        for row in rows
    ]
    speeds = ", ".join(
        f"{row['model']} {short(row['tokens_per_s'])}"
        for row in rows
        if _form(row) == _form(rows[-1])
    )
    note = (
        "FMA and cache bytes are per token. Weight bytes: all tensors. Times are medians, that of "
        "the batch ± half the interquartile range. Tokens per second of the batch, in the form of "
        f"the last row: {speeds}. The last column compares them with those of the ancestor in the "
        "same form. Ancestor: the model before compression. Uniform: the ancestor with all widths "
        "narrowed evenly to the work of the compressed model. Form: train, that of training, or "
        "serve, the inference form with the fastest operators."
    )
    # Eighty columns hold these headers and numbers without breaking a word.
    headers = ["model", "form", "FMA", "weight\nbytes", "cache\nbytes", "one,\nms",
               "the\nbatch,\nms", "tokens\nper s\nover\nancestor"]  # fmt: skip
    return Table(f"Serving on {device}{_sizes(rows[0])}", headers, lines, note, left=(0, 1))


def _sizes(row: Mapping[str, Any]) -> str:
    """What was served, where a row says so: those of older files do not."""
    if "batch" not in row:
        return ""
    if row["decode"]:
        return f", one more token of {row['batch']} sequences after {row['length'] - 1}"
    return f", a batch of {row['batch']}×{row['length']} tokens"


def _with_spread(row: Mapping[str, Any], key: str) -> str:
    return f"{_ms(row[key])} {_percent(_spread(row, key))}"


def _ms(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else milliseconds(ms).removesuffix(" ms")


def _form(row: Mapping[str, Any]) -> str:
    return str(row.get("form", "training"))
