"""The tables of benchmarks.small_rivals, which benchmarks.tables puts into results/README.md."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept_rows import commands_in
from benchmarks.table_sources import read

from gaugelasso.errors import UserError
from gaugelasso.report.formats import DASH, count
from gaugelasso.report.schema import FINITE, TEXT, check_keys

RIVALS = Path("results/promise/rivals.json")
# In the order of the columns and of the rows.
TASKS = {
    "retrieval": "retrieval",
    "sorting": "sorting",
    "division": "division",
    "addition": "a + b mod 97",
    "portraits": "portraits",
    "text": "text",
}
METHODS = {
    "compression": "compression to the target loss",
    "full": "full model",
    "from scratch": "its structure from scratch",
    "compression-long": "compression to this work, long",
    "uniform-long": "uniform, long",
    "uniform": "uniform",
    "post-hoc": "post-hoc pruning",
    "cofi": "CoFi",
    "cofi-unbounded": "CoFi, masks without bound",
    "cofi-layers": "CoFi with distillation of layers",
    "torch-pruning-magnitude": "Torch-Pruning, magnitude, global",
    "torch-pruning-isomorphic": "Torch-Pruning, magnitude, isomorphic",
    "torch-pruning-group-norm": "Torch-Pruning, group norm, global",
}
_KINDS = {"task": TEXT, "method": TEXT, "share": FINITE, "seed": FINITE, "named": FINITE}
Rows = Sequence[Mapping[str, Any]]


def rivals_section(root: Path) -> list[str]:
    """The lines of the section; none if there are no results."""
    if not (root / RIVALS).exists():
        return []
    data = read(root / RIVALS)
    rows: Rows = data["rows"]
    for number, row in enumerate(rows):
        check_keys(f"rows[{number}] of {str(RIVALS)!r}", row, _KINDS)
        if row["task"] not in TASKS or row["method"] not in METHODS:
            raise UserError(f"{RIVALS}: no row or column for {row['method']!r} on {row['task']!r}")
    seeds = sorted({row["seed"] for row in rows})
    return [
        "## Rivals on small tasks",
        "",
        "Not in the paper. A run of each small config names its loss. The others are asked for the "
        'work per token that this run ended with. "Long" is three times the steps; pruned models '
        "are fine-tuned for as many steps as the full model was trained. Each cell has the mean "
        f"FMA, then the test loss of each seed ({', '.join(map(str, seeds))}), **bold** where the "
        "model has the target loss with at most 1.1 times the work. The last column is the "
        "training work with that of all runs which the method needs, over that of the compressed "
        "run.",
        "",
        *_table(rows, seeds, 1),
        "",
        "What has the loss was asked for half of the work:",
        "",
        *_table(rows, seeds, 0.5),
        "",
        "```sh",
        *commands_in(data),
        "```",
        "",
        " ".join([f"{data['hardware']}, {data['date']}.", *filter(None, [data.get("note")])]),
        "",
    ]


def _table(rows: Rows, seeds: Sequence[int], share: float) -> list[str]:
    named = {row["task"]: row["named"] for row in rows}
    tasks = [task for task in TASKS if task in named]
    heads = [f"{TASKS[task]}, {named[task]:g}" for task in tasks]
    lines = ["| " + " | ".join(["method", *heads, "training work"]) + " |"]
    lines.append("|---" * (len(heads) + 2) + "|")
    trained = [row for row in rows if "training_fma" in row]
    own = [row for row in trained if row["method"] == "compression"]
    paid = {(row["task"], row["seed"]): row["training_fma"] for row in own}
    for method, name in METHODS.items():
        of = [row for row in rows if row["method"] == method and row["share"] == share]
        if not of:
            continue
        cells = [_cell([r for r in of if r["task"] == task], seeds) for task in tasks]
        made = [r for r in of if r in trained and (r["task"], r["seed"]) in paid]
        work = [row["training_fma"] / paid[row["task"], row["seed"]] for row in made]
        spread = f"{min(work):.1f}–{max(work):.1f}" if work else DASH
        lines.append("| " + " | ".join([name, *cells, spread]) + " |")
    return lines


def _cell(rows: Rows, seeds: Sequence[int]) -> str:
    """Mean work and the loss of each seed; a dash for a seed that was not asked."""
    if not rows:
        return ""
    by_seed = {row["seed"]: row for row in rows}
    made = [row["fma_final"] for row in rows if "fma_final" in row]
    work = [count(round(statistics.fmean(made)))] if made else []
    losses = [_loss(by_seed[seed]) if seed in by_seed else DASH for seed in seeds]
    return " ".join([*work, *losses])


def _loss(row: Mapping[str, Any]) -> str:
    if "refused" in row:
        return "refused"
    text = "not finite" if row["loss"] is None else f"{row['loss']:.3g}"
    return f"**{text}**" if row["holds"] else text
