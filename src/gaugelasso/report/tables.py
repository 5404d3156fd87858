"""The report's tables: which figures stand in which row. How they are printed: layout.py."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from gaugelasso.report import words
from gaugelasso.report.data import END_AXES, LAYER_KINDS, Run, operator_count, outcome
from gaugelasso.report.layout import Table, render
from gaugelasso.report.words import DASH, Format, count, known, over_seeds, ratio, width_range
from gaugelasso.runs.step_time import initial_step_ms

_LARGEST_EVENTS = 20
_AXES_NAMED = 3  # in the "dropped" cell of an event


def before_after(runs: Sequence[Run]) -> Table:
    """What a condition started from and what is left; several runs as mean ± std."""
    ends = [outcome(run) for run in runs]
    births = [run.initial["widths"] for run in runs]
    finals = [run.widths_at(run.last_step) for run in runs]
    metric, target = runs[0].metric_name, runs[0].loss_target

    def row(name: str, before: Iterable[Any], after: Iterable[Any], form: Format) -> list[str]:
        pairs = list(zip(before, after, strict=True))
        cells = [over_seeds(values, form) for values in zip(*pairs, strict=True)]
        return [name, *cells, over_seeds([b / a if b and a else None for b, a in pairs], ratio)]

    def result(name: str, values: Iterable[Any], form: Format, remark: str = "") -> list[str]:
        return [name, DASH, over_seeds(list(values), form), remark]

    step_time = row(
        "step time", map(_initial_step_ms, runs), map(_last_ms, runs), words.milliseconds
    )
    if births == finals:
        step_time[-1] = DASH  # of one structure it would tell of the machine alone

    rows = [
        row(
            f"FMA per token (accounting: {runs[0].accounting})",
            (e.fma_initial for e in ends),
            (e.fma_final for e in ends),
            count,
        ),
        row(
            "parameters",
            (e.parameters_initial for e in ends),
            (e.parameters_final for e in ends),
            count,
        ),
        row("residual sites D", (w.get("D") for w in births), (w.get("D") for w in finals), count),
        row("operators", map(operator_count, births), map(operator_count, finals), count),
        result(
            "held-out loss" if all(e.finished for e in ends) else "training loss",
            (e.loss for e in ends),
            words.figure,
            f"target {target:g}",
        ),
        result(
            metric,
            (e.metric for e in ends),
            words.metric_format(metric),
            "lower is better" if runs[0].metric_lower_is_better else "",
        ),
        *(
            result(name, (e.figures.get(name) for e in ends), words.metric_format(name))
            for name in dict.fromkeys(name for e in ends for name in e.figures)
        ),
        step_time,
        row(
            "training work (FMA per token, all steps)",
            (e.fma_initial * e.steps for e in ends),
            (e.training_fma for e in ends),
            words.short,
        ),
        result("first batch within the loss target, step", (e.reached_step for e in ends), count),
        *(
            result(name, values, count)
            for name, values in (
                ("went back to an earlier state", [e.returns for e in ends]),
                ("steps skipped: loss or gradient not a number", [e.skipped for e in ends]),
            )
            if any(values)
        ),
        result("steps", (e.steps for e in ends), count),
        result("wall time", (e.wall_s for e in ends), words.seconds),
    ]
    note = "Step time: median of the first rows of the log at the full structure, and of the last "
    note += "rows. Training work before: the full model for as many steps."
    if len(runs) > 1:
        note += f" Figures are mean ± standard deviation of {len(runs)} seeds."
    return Table("Before and after", ["", "before", "after", "ratio"], rows, note)


def structure_table(run: Run) -> Table:
    """Surviving channels of every axis in every layer; the last row is what each was born with."""
    widths, birth = run.widths_at(run.last_step), run.initial["widths"]
    now = {kind: run.depth_widths(kind, run.last_step) for kind in LAYER_KINDS}
    born = {kind: run.depth_widths(kind, 0) for kind in LAYER_KINDS}
    heads = _heads(run)
    rows = []
    for depth in range(run.layers):
        cells = {kind: _cell(now[kind][depth], born[kind][depth]) for kind in LAYER_KINDS}
        alive = now["d_ai"][depth] > 0
        rows.append(_layer_row(str(depth), cells, heads.get(depth, "") if alive else cells["d_ai"]))
    ceilings = {kind: width_range(values) for kind, values in born.items()}
    rows.append(_layer_row("at birth", ceilings, " ".join(sorted(set(heads.values())))))
    ends = [
        f"{kind} {widths.get(name, 0)} of {birth[name]}"
        for kind, name in END_AXES.items()
        if name in birth
    ]
    note = f"{'; '.join(ends)}. {DASH}: operator removed."
    if run.config["model"].get("rope"):
        note += " One d_k is a RoPE pair."
    headers = ["layer", "d_ai", "H", *LAYER_KINDS[1:]]
    return Table(f"Structure, seed {run.seed}", headers, rows, note, foot=1)


def next_table(run: Run) -> Table | None:
    """What would be cut next; None where the summary does not say."""
    rows = (run.summary or {}).get("next_to_go")
    if not rows:
        return None
    cells = [
        [_short(row["axis"]), str(row["index"]), count(row["price"]),
         words.figure(row["utility_per_fma"])]
        for row in rows
    ]  # fmt: skip
    note = "The channels that give least for what they cost: at a higher loss target these would "
    note += "go first. Utility is the loss that a removal adds to first order, per unit of rho; "
    note += "an index counts from 0 in the final model."
    headers = ["axis", "index", "price (FMA)", "utility per FMA"]
    return Table(f"Next to go, seed {run.seed}", headers, cells, note)


def run_tables(run: Run) -> list[Table]:
    """What is told of each run by itself: its structure first."""
    return [structure_table(run), *filter(None, [next_table(run)])]


def runs_table(runs: Sequence[Run]) -> Table:
    """One row a seed; mean and standard deviation at the end."""
    ends = [outcome(run) for run in runs]
    columns: list[tuple[str, list[Any], Format]] = [
        ("steps", [e.steps for e in ends], count),
        ("FMA", [e.fma_final for e in ends], count),
        ("compression", [e.compression for e in ends], ratio),
        ("parameters", [e.parameters_final for e in ends], count),
        ("operators", [operator_count(r.widths_at(r.last_step)) for r in runs], count),
        ("loss", [e.loss for e in ends], words.figure),
        (runs[0].metric_name, [e.metric for e in ends], words.metric_format(runs[0].metric_name)),
        ("first batch within target", [e.reached_step for e in ends], count),
        ("last step time", [_last_ms(run) for run in runs], words.milliseconds),
        ("wall time", [e.wall_s for e in ends], words.seconds),
    ]
    cells = [[known(value, form) for value in values] for _, values, form in columns]
    rows = [[str(run.seed), *row] for run, row in zip(runs, zip(*cells, strict=True), strict=True)]
    foot = 0
    if len(runs) > 1:
        pairs = [words.mean_std(values, form) for _, values, form in columns]
        rows += [["mean", *(mean for mean, _ in pairs)], ["std", *(std for _, std in pairs)]]
        foot = 2
    unfinished = [str(r.seed) for r, e in zip(runs, ends, strict=True) if not e.finished]
    note = f"Not finished: seed {', '.join(unfinished)}." if unfinished else ""
    return Table("Runs", ["seed", *(name for name, _, _ in columns)], rows, note, foot=foot)


def events_table(runs: Sequence[Run], most: int = _LARGEST_EVENTS) -> Table:
    """The events that freed the most work, largest first, with the loss before and after."""
    events = [(run, event) for run in runs for event in run.events]
    drops = [pair for pair in events if pair[1]["dropped"]]
    drops.sort(key=lambda pair: pair[1]["fma"] - pair[1]["fma_before"])
    rows = []
    for run, event in drops[:most]:
        before, after = event["fma_before"], event["fma"]
        losses = [event.get(f"loss_{when}") for when in ("before", "balanced", "after")]
        rows.append([
            *([str(run.seed)] if len(runs) > 1 else []),
            count(event["step"]), count(before), count(after),
            count(before - after), f"{(before - after) / before:.1%}",
            *(known(loss, words.figure) for loss in losses),
            _dropped(event["dropped"]), ", ".join(map(_short, event["removed"])),
        ])  # fmt: skip
    headers = ["step", "FMA before", "FMA after", "FMA freed", "share", "loss before", "balanced"]
    headers = [*(["seed"] if len(runs) > 1 else []), *headers]
    headers += ["after", "channels dropped", "removed"]
    refused = sum(bool(event["refused"]) for _, event in events)
    note = f"{len(events)} events, {len(drops)} with a drop, {refused} refused"
    for what in ("split", "balance", "cut"):
        if undone := sum(what in event.get("undone", {}) for _, event in events):
            note += f", {undone} with the {what} undone"
    note += ". Share: freed of the FMA before. Losses are on one training batch: before the event, "
    note += "after balancing, after the cut."
    text = (len(headers) - 2, len(headers) - 1)
    return Table(f"Largest drops (at most {most})", headers, rows, note, text)


def print_outcome(run: Run, console: Console) -> None:
    """The before/after table under the sentence that sums it up."""
    held, sentence = words.verdict([run])
    console.print(words.headline([run]), style="bold", markup=False, highlight=False)
    style = {True: "green", False: "yellow", None: ""}[held]
    console.print(sentence, style=style, markup=False, highlight=False)
    render(before_after([run]), console)


def print_structure(run: Run, console: Console) -> None:
    render(structure_table(run), console)


def _initial_step_ms(run: Run) -> float | None:
    return initial_step_ms(run.metrics, run.initial["fma"])


def _last_ms(run: Run) -> float | None:
    """Median step time in ms over the last rows: single ones hold captures."""
    _, times = run.column("step_ms")
    some = min(10, max(1, len(times) // 4))
    return statistics.median(times[-some:]) if times else None


def _layer_row(name: str, cells: Mapping[str, str], heads: str) -> list[str]:
    first, *others = (cells[kind] for kind in LAYER_KINDS)
    return [name, first, heads, *others]


def _cell(now: int, born: int) -> str:
    """An extent; a dash for what was removed, nothing for what never was."""
    return f"{now:,}" if now else DASH if born else ""


def _heads(run: Run) -> dict[int, str]:
    """Depth -> number of heads at birth, and of key heads where they are fewer."""
    structure = run.initial.get("structure", {})
    attention = [op for op in structure.get("operators", []) if op["kind"] == "attention"]
    return {
        op["depth"]: f"{op['heads']}"
        + ("" if op["heads"] == op["kv_heads"] else f"/{op['kv_heads']}")
        for op in attention
    }


def _short(name: str) -> str:
    return name.removeprefix("operators.")


def _dropped(dropped: Mapping[str, int]) -> str:
    """How many channels went, and from which axes most of them."""
    largest = sorted(dropped.items(), key=lambda item: -item[1])
    named = [f"{_short(axis)} {number}" for axis, number in largest[:_AXES_NAMED]]
    more = len(largest) - len(named)
    named += [f"{more} more {'axis' if more == 1 else 'axes'}"] if more else []
    return f"{sum(dropped.values())}: {', '.join(named)}"
