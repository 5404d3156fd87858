"""The command compare: methods side by side, in quality, work and measured time."""

from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.baselines.latency import latencies
from gaugelasso.cli.arguments import Device, Out, RunPaths
from gaugelasso.cli.output import console, print_line
from gaugelasso.config import run_config
from gaugelasso.errors import UserError
from gaugelasso.report import common_folder, write_methods
from gaugelasso.report.comparable import load_runs
from gaugelasso.report.compare import compare as make_comparison
from gaugelasso.report.compare import compare_table
from gaugelasso.report.layout import render, to_markdown
from gaugelasso.report.results_schema import check_place
from gaugelasso.report.run import Run
from gaugelasso.report.timing import busy
from gaugelasso.runs.environment import environment
from gaugelasso.runs.reading import exists
from gaugelasso.runs.writing import check_writable
from gaugelasso.training.evaluation import choose_device


def compare(
    runs: RunPaths,
    latency: Annotated[
        bool,
        typer.Option("--latency", help="Measure the milliseconds of one sequence of each model."),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD", help="Method to test against; default: compression, or the first."
        ),
    ] = None,
    out: Out = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Also write the results file (JSON) here, as make tables reads it."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing file of --results.")
    ] = False,
    device: Device = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed repetitions of --latency.")] = 30,
) -> None:
    """Compare methods over their seeds: loss and metric against FMA and milliseconds.

    Runs must be finished, have the same task and data, and be evaluated on as much of it. A run
    that missed its target is compared too, and marked. The default output folder is "compare" in
    the common folder of the runs.

    Example: gaugelasso compare runs/main runs/post-hoc runs/scratch

    Example: gaugelasso compare runs/main runs/uniform --latency --out runs/compared

    Example: gaugelasso compare runs/main runs/cofi --results comparison.json
    """
    if not latency and device is not None:
        raise UserError("--device is for --latency; give both or none")
    loaded = load_runs(runs)
    make_comparison(loaded, against)  # raises for runs that cannot be compared, before measuring
    folder = out or common_folder(runs) / "compare"
    if results is not None:
        check_place(results, loaded[0].task)
    for path in filter(None, (folder / "compare.json", results)):
        check_writable(path)
    if results is not None and exists(results) and not overwrite:
        raise UserError(
            f"results file {str(results)!r} already exists; add --overwrite to replace it, or "
            "choose another --results"
        )
    found = make_comparison(loaded, against, *_measure(loaded, device, repeats, latency))
    files = write_methods(found, folder, results)
    if console.is_terminal:
        render(compare_table(found), console)
    else:  # a log file has no width to fit a table to
        print_line(to_markdown(compare_table(found)))
    for name, path in files.items():
        print_line(f"{name}: {path}")


def _measure(
    runs: list[Run], device: str | None, repeats: int, wanted: bool
) -> tuple[dict[Path, float] | None, dict[str, object] | None]:
    """Milliseconds by run folder, the models taken in turns, and how they were measured."""
    if not wanted:
        return None, None
    config = run_config(runs[0].path)
    where = choose_device(device or config.train.device)
    rows = latencies({str(run.path): run.path for run in runs}, config, where, repeats)
    spread = {
        name: {
            "latency_ms": row["latency_ms"],
            "quartiles": {"latency_ms": row["latency_quartiles"]},
        }
        for name, row in rows.items()
    }
    if warning := busy(spread):
        print_line(f"warning: {warning}")
    times = {Path(name): float(row["latency_ms"]) for name, row in rows.items()}
    named = where if where.startswith("cuda") else "cpu, 1 thread"
    return times, {
        "device": named, "hardware": environment(where)["hardware"], "repeats": repeats,
        "quartiles": {name: row["latency_quartiles"] for name, row in rows.items()},
    }  # fmt: skip
