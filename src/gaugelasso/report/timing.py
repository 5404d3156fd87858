"""Tables of a benchmark: where a step's time goes, how fast models are served."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from gaugelasso.report.layout import Table, render
from gaugelasso.report.words import count, milliseconds, ratio

Rows = Mapping[str, Mapping[str, Any]]

_PARTS = {
    "whole step": "ms",
    "forward": "forward_ms",
    "backward": "backward_ms",
    "optimizer": "optimizer_ms",
    "penalty, solver, slow weights": "machinery_ms",
    "the same training without them": "baseline_ms",
    "whole step without a graph": "eager_ms",
    "structural event without a cut": "event_ms",
}


def print_bench(rows: Rows, console: Console) -> None:
    """A step's parts, or models side by side, as the rows have it."""
    served = {name: row for name, row in rows.items() if "latency_ms" in row}
    if served:
        render(serving_table(served), console)
    for name, row in rows.items():
        if name not in served:
            render(step_table(name, row), console)


def step_table(name: str, row: Mapping[str, Any]) -> Table:
    whole = row["ms"]
    lines = [
        [part, milliseconds(row[key]), f"{100 * row[key] / whole:.0f}%"]
        for part, key in _PARTS.items()
    ]
    work = f"{count(row['fma'])} FMA per token"
    if row["multiple"] > 1:
        work += (
            f" with widths rounded up to multiples of {row['multiple']}, "
            f"{count(row['fma_exact'])} without"
        )
    note = (
        f"Compression, with a step's share of an event, adds "
        f"{100 * row['machinery_share']:.0f}% to the same training without it. "
        f"{count(row['tokens_per_s'])} tokens/s; {row['tflops']:.3g} TFLOP/s of "
        f"{row['matrix_tflops']:.3g} that a large matrix product reaches here; peak memory "
        f"{row['peak_gib']:.2f} GiB; {work}; "
        f"{count(row['parameters'])} parameters."
    )
    return Table(name, ["part", "median", "of the step"], lines, note)


def serving_table(rows: Rows) -> Table:
    born = {row["device"]: row for row in rows.values() if row["model"] == "ancestor"}
    lines = [
        [
            row["model"],
            row["device"],
            count(row["fma"]),
            milliseconds(row["latency_ms"]),
            count(row["tokens_per_s"]),
            ratio(row["tokens_per_s"] / born[row["device"]]["tokens_per_s"]),
        ]
        for row in rows.values()
    ]
    note = (
        "Latency of one whole sequence; throughput of a training batch; medians. Ancestor: the "
        "model before compression. Uniform: the ancestor narrowed evenly to the same work."
    )
    headers = ["model", "device", "FMA per token", "latency", "tokens/s", "against the ancestor"]
    return Table("Serving", headers, lines, note, left=(0, 1))
