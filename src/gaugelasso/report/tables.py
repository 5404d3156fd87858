"""The report's tables: the figures in each row. layout.py prints them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from gaugelasso.report import formats, served
from gaugelasso.report.costs import about, cost_columns, initial_work, work_format
from gaugelasso.report.data import note_on_own_loops
from gaugelasso.report.event_table import axis_name, exchange_table
from gaugelasso.report.formats import DASH, Format, count, known, over_seeds, ratio, width_range
from gaugelasso.report.goal import goal_cell
from gaugelasso.report.layout import Table, render
from gaugelasso.report.outcome import last_step_ms, loss_name, outcome
from gaugelasso.report.run import END_AXES, LAYER_KINDS, Run, operator_count
from gaugelasso.report.verdict import headline, verdict
from gaugelasso.runs.step_time import initial_step_ms
from gaugelasso.runs.units import noun, unit


def before_after(runs: Sequence[Run]) -> Table:
    """Initial and final figures of a condition; several runs as mean ± std."""
    ends = [outcome(run) for run in runs]
    initials = [run.initial["widths"] for run in runs]
    finals = [run.widths_at(run.last_step) for run in runs]
    metric, to_loss = runs[0].metric_name, runs[0].loss_target is not None
    work, needs, loss_is = "training work", ends[0].needs, loss_name(runs)
    counted, finished = runs[0].accounting, all(e.finished for e in ends)

    def row(name: str, before: Iterable[Any], after: Iterable[Any], form: Format) -> list[str]:
        pairs = list(zip(before, after, strict=True))
        cells = [over_seeds(values, form) for values in zip(*pairs, strict=True)]
        return [name, *cells, over_seeds([b / a if b and a else None for b, a in pairs], ratio)]

    def result(
        name: str, values: Iterable[Any], form: Format, remark: str = "", before: Sequence[Any] = ()
    ) -> list[str]:
        first = over_seeds(before, form) if finished and before else DASH
        return [name, first, over_seeds(list(values), form), remark]

    better = "lower is better" if runs[0].metric_lower_is_better else ""
    originals = [run.original_metric for run in runs]
    form = formats.metric_format(metric)
    scored = result(metric, [e.metric for e in ends], form, better, originals)
    step_time = row(
        "step time", map(_initial_step_ms, runs), map(last_step_ms, runs), formats.milliseconds
    )
    if initials == finals:
        step_time[-1] = DASH  # with an unchanged structure, the ratio measures only the machine

    rows = [
        row(
            f"{unit(counted)} (accounting: {counted}{about(counted, runs)})",
            (e.fma_initial for e in ends),
            (e.fma_final for e in ends),
            work_format(counted),
        ),
        *(
            row(each.title, map(each.before, runs), map(each.after, runs), each.form)
            for each in cost_columns(runs, counted)
        ),
        *(
            row(
                served.column(label),
                (served.before(run, label) for run in runs),
                (served.after(run, label) for run in runs),
                formats.figure,
            )
            for label in served.served_as(runs)
        ),
        row(
            "parameters",
            (e.parameters_initial for e in ends),
            (e.parameters_final for e in ends),
            count,
        ),
        *(
            ()
            if runs[0].own_model
            else (
                row(
                    "residual sites D",
                    [w.get("D") for w in initials],
                    [w.get("D") for w in finals],
                    count,
                ),
                row("operators", map(operator_count, initials), map(operator_count, finals), count),
            )
        ),
        result(
            loss_is,
            (e.loss for e in ends),
            formats.figure,
            f"target {goal_cell(runs)}" if to_loss else "",
            [run.original_loss for run in runs],
        ),
        *([scored] if metric != loss_is else []),
        *(
            result(name, (e.figures.get(name) for e in ends), formats.metric_format(name))
            for name in dict.fromkeys(name for e in ends for name in e.figures)
        ),
        step_time,
        row(
            f"{work} (FMA per token, all steps)",
            (initial_work(run) * e.steps for run, e in zip(runs, ends, strict=True)),
            (e.training_fma for e in ends),
            formats.short,
        ),
        *(
            [
                result(
                    f"{work} in all, with {needs}", (e.training_total for e in ends), formats.short
                )
            ]
            if needs
            else ()
        ),
        *(
            [result("first batch within the loss target, step", reached, count)]
            if (reached := [e.reached_step for e in ends]) and to_loss
            else ()
        ),
        *(
            result(name, values, count)
            for name, values in (
                ("returns to an earlier checkpoint", [e.returns for e in ends]),
                (
                    "steps skipped because of a NaN or infinite loss or gradient",
                    [e.skipped for e in ends],
                ),
            )
            if any(values)
        ),
        result("steps", (e.steps for e in ends), count),
        result("wall time", (e.wall_s for e in ends), formats.seconds),
        *(
            [result(f"wall time in all, with {needs}", walls, formats.seconds)]
            if needs and any(walls := [e.wall_total for e in ends])
            else ()
        ),
    ]
    note = "Step time: median of the first rows of the log with the initial structure, and of the "
    note += "last rows. Training work before: the initial model for the same number of steps. "
    note += "After: of the run's own steps."
    if len(runs) > 1:
        note += f" Figures are mean ± standard deviation of {len(runs)} {runs[0].told_by}s."
    return Table("Before and after", ["", "before", "after", "ratio"], rows, note)


def axes_table(run: Run) -> Table:
    """Surviving channels of every axis of a model of the user."""
    widths, initial = run.widths_at(run.last_step), run.initial["widths"]
    rows = [
        [name, count(first), _cell(widths.get(name, 0), first)] for name, first in initial.items()
    ]
    note = f"Model: {run.own_model}. {DASH}: the operator was removed."
    return Table(f"Structure, {run.title}", ["axis", "initial", "final"], rows, note)


def structure_table(run: Run) -> Table:
    """Surviving channels of every axis in every layer; the last row holds the initial widths."""
    if run.own_model:
        return axes_table(run)
    widths, initial_widths = run.widths_at(run.last_step), run.initial["widths"]
    final = {kind: run.depth_widths(kind, run.last_step) for kind in LAYER_KINDS}
    initial = {kind: run.depth_widths(kind, 0) for kind in LAYER_KINDS}
    heads = _heads(run)
    rows = []
    for depth in range(run.layers):
        cells = {kind: _cell(final[kind][depth], initial[kind][depth]) for kind in LAYER_KINDS}
        alive = final["d_ai"][depth] > 0
        rows.append(_layer_row(str(depth), cells, heads.get(depth, "") if alive else cells["d_ai"]))
    ceilings = {kind: width_range(values) for kind, values in initial.items()}
    rows.append(_layer_row("initial", ceilings, " ".join(sorted(set(heads.values())))))
    ends = [
        f"{kind} {widths.get(name, 0)} of {initial_widths[name]}"
        for kind, name in {**END_AXES, "d_h": "classifier.d_h"}.items()
        if name in initial_widths
    ]
    note = f"{'; '.join(ends)}. {DASH}: operator removed. H: number of heads."
    if run.is_rotary:
        note += " One channel of d_k is a RoPE pair."
    headers = ["layer", "d_ai", "H", *LAYER_KINDS[1:]]
    return Table(f"Structure, {run.title}", headers, rows, note, foot=1)


def next_table(run: Run) -> Table | None:
    """The channels that would be removed next; None if the summary does not list them."""
    rows = (run.summary or {}).get("next_to_go")
    if not rows:
        return None
    cells = [
        [axis_name(row["axis"]), str(row["index"]), work_format(run.accounting)(row["price"]),
         formats.figure(row["utility_per_fma"])]
        for row in rows
    ]  # fmt: skip
    note = "The channels with the least utility for their price: with a higher loss target these "
    note += "would be removed first. Utility is the loss that a removal adds to first order, per "
    note += "unit of rho. An index counts from 0 in the final model."
    cost = noun(run.accounting)
    headers = ["axis", "index", f"price ({cost})", f"utility per {cost}"]
    return Table(f"Next to be removed, {run.title}", headers, cells, note)


def run_tables(run: Run) -> list[Table]:
    """The tables that are specific to one run: its structure first."""
    return [structure_table(run), *filter(None, [next_table(run)])]


def runs_table(runs: Sequence[Run]) -> Table:
    """One row per seed; mean and standard deviation at the end."""
    ends, counted = [outcome(run) for run in runs], runs[0].accounting
    metric = runs[0].metric_name
    form = formats.metric_format(metric)
    columns: list[tuple[str, list[Any], Format]] = [
        ("steps", [e.steps for e in ends], count),
        (noun(counted), [e.fma_final for e in ends], work_format(counted)),
        ("compression", [e.compression for e in ends], ratio),
        *(
            (each.name, [each.after(run) for run in runs], each.form)
            for each in cost_columns(runs, counted)
        ),
        *(
            (served.column(label), [served.after(run, label) for run in runs], formats.figure)
            for label in served.served_as(runs)
        ),
        ("parameters", [e.parameters_final for e in ends], count),
        ("operators", [operator_count(r.widths_at(r.last_step)) for r in runs], count),
        ("loss", [e.loss for e in ends], formats.figure),
        *([(metric, [e.metric for e in ends], form)] if metric != loss_name(runs) else []),
        ("first batch within target", [e.reached_step for e in ends], count),
        ("last step time", [last_step_ms(run) for run in runs], formats.milliseconds),
        ("wall time", [e.wall_s for e in ends], formats.seconds),
    ]
    cells = [[known(value, form) for value in values] for _, values, form in columns]
    rows = [[run.mark, *row] for run, row in zip(runs, zip(*cells, strict=True), strict=True)]
    foot = 0
    if len(runs) > 1:
        pairs = [formats.mean_std(values, form) for _, values, form in columns]
        rows += [["mean", *(mean for mean, _ in pairs)], ["std", *(std for _, std in pairs)]]
        foot = 2
    unfinished = [r.mark for r, e in zip(runs, ends, strict=True) if not e.finished]
    note = f"Not finished: {runs[0].told_by} {', '.join(unfinished)}." if unfinished else ""
    headers = [runs[0].told_by, *(name for name, _, _ in columns)]
    return Table("Runs", headers, rows, (note + note_on_own_loops(runs)).strip(), foot=foot)


def print_outcome(run: Run, console: Console) -> None:
    """Print two sentences that sum up the run, and the before/after table."""
    held, sentence = verdict([run])
    console.print(headline([run]), style="bold", markup=False, highlight=False)
    style = {True: "green", False: "yellow", None: ""}[held]
    console.print(sentence, style=style, markup=False, highlight=False)
    render(before_after([run]), console)


def print_structure(run: Run, console: Console) -> None:
    render(structure_table(run), console)


def print_exchanges(run: Run, console: Console) -> None:
    """Print what channels were exchanged, if any were."""
    if table := exchange_table([run]):
        render(table, console)


def _initial_step_ms(run: Run) -> float | None:
    return initial_step_ms(run.metrics, run.initial["fma"])


def _layer_row(name: str, cells: Mapping[str, str], heads: str) -> list[str]:
    first, *others = (cells[kind] for kind in LAYER_KINDS)
    return [name, first, heads, *others]


def _cell(final: int, initial: int) -> str:
    """A width; a dash if the operator was removed, empty if it never existed."""
    return f"{final:,}" if final else DASH if initial else ""


def _heads(run: Run) -> dict[int, str]:
    """Depth -> initial number of heads, and of key heads if they are fewer."""
    structure = run.initial.get("structure", {})
    attention = [op for op in structure.get("operators", []) if op["kind"] == "attention"]
    return {
        op["depth"]: f"{op['heads']}"
        + ("" if op["heads"] == op["kv_heads"] else f"/{op['kv_heads']}")
        for op in attention
    }
