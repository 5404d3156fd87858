"""Commands that read run folders: report, pareto, advise, info. They run no model."""

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.cli.arguments import Out, RunPath, RunPaths
from gaugelasso.cli.output import console, print_line
from gaugelasso.config import Config
from gaugelasso.errors import UserError
from gaugelasso.report import common_folder, write_pareto, write_report
from gaugelasso.report.advice import advise as make_advice
from gaugelasso.report.data import load_run
from gaugelasso.report.tables import print_exchanges, print_outcome, print_structure
from gaugelasso.runs.reading import IMPORTED, exists
from gaugelasso.runs.writing import make_folder, write_text


def report(
    runs: RunPaths,
    out: Out = None,
) -> None:
    """Write pictures, tables and one HTML page about a run, or about several seeds.

    Several runs must differ only in their seed. The default output folder is "report" in RUN.

    Example: gaugelasso report runs/demo

    Example: gaugelasso report runs/main --out reports/main
    """
    files = write_report(runs, out)
    for name, path in (
        ("structural profile", files.profile),
        ("saturation", files.saturation),
        ("training curves", files.training),
        ("examples", files.samples),
        ("baseline", files.baseline),
        ("report", files.page),
    ):
        if path is not None:
            print_line(f"{name}: {path}")


def pareto(runs: RunPaths, out: Out = None) -> None:
    """Draw held-out loss against work for runs with different targets or settings.

    Runs with the same settings form one condition, named by the settings that differ.

    Example: gaugelasso pareto runs/loose runs/main runs/tight --out runs/pareto
    """
    picture, table = write_pareto(runs, out)
    print_line(table.read_text(encoding="utf-8"))
    print_line(f"picture: {picture}")
    print_line(f"table: {table}")


def advise(
    runs: RunPaths,
    out: Annotated[
        Path | None, typer.Option(help="Config file to write; default: next.toml in RUN.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing config file.")
    ] = False,
) -> None:
    """Suggest which axes to widen or narrow, and write the config of the next run.

    Example: gaugelasso advise runs/demo --out configs/second.toml

    Example: gaugelasso train runs/demo/next.toml --out runs/second
    """
    advice = make_advice(runs)
    for line in advice.lines:
        print_line(line)
    # Raises for a config that could not be trained, before a file is written.
    Config.from_dict(tomllib.loads(advice.config))
    path = out or common_folder(runs) / "next.toml"
    if exists(path) and not overwrite:
        raise UserError(
            f"config {str(path)!r} already exists; add --overwrite to replace it, "
            "or choose another --out"
        )
    make_folder(path.parent)
    write_text(path, advice.config)
    print_line(f"next config: {path}")


def info(run: RunPath) -> None:
    """Print the structure of a run's model, layer by layer, and the run's outcome.

    An imported model has no outcome yet.

    Example: gaugelasso info runs/demo
    """
    loaded = load_run(run)
    print_structure(loaded, console)
    if loaded.task == IMPORTED:
        source, fma = loaded.config["task"].get("source"), loaded.initial["fma"]
        print_line(f"imported from {str(source)!r}, not trained here: {fma:,.0f} FMA per token")
        return
    print_outcome(loaded, console)
    print_exchanges(loaded, console)
