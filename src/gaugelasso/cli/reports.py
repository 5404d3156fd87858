"""Commands that read run folders: no model is run."""

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.cli.arguments import Out, RunPath, RunPaths
from gaugelasso.cli.output import console, say
from gaugelasso.config import Config
from gaugelasso.errors import UserError
from gaugelasso.report import home, write_pareto, write_report
from gaugelasso.report.advice import advise as suggest
from gaugelasso.report.data import load_run
from gaugelasso.report.tables import print_outcome, print_structure
from gaugelasso.runs.reading import exists
from gaugelasso.runs.writing import make_folder, write_text


def report(
    runs: RunPaths,
    out: Out = None,
) -> None:
    """Draw what happened: profile, saturation, curves, and a one-page HTML report.

    Example: gaugelasso report runs/demo
    """
    files = write_report(runs, out)
    for name, path in (
        ("structural profile", files.profile),
        ("saturation", files.saturation),
        ("training curves", files.training),
        ("examples", files.samples),
        ("report", files.page),
    ):
        if path is not None:
            say(f"{name}: {path}")


def pareto(runs: RunPaths, out: Out = None) -> None:
    """Draw held-out loss against work for runs with other targets or settings.

    Takes runs, folders of seeds, or a folder of such; what differs names the condition.

    Example: gaugelasso pareto runs/loose runs/main runs/tight --out runs/pareto
    """
    picture, table = write_pareto(runs, out)
    say(table.read_text(encoding="utf-8"))
    say(f"picture: {picture}")
    say(f"table: {table}")


def advise(
    runs: RunPaths,
    out: Annotated[
        Path | None, typer.Option(help="Config to write; default next.toml in RUN.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing config.")
    ] = False,
) -> None:
    """Say which axes to widen or narrow next, and write the next config.

    Example: gaugelasso advise runs/demo --out configs/second.toml

    Example: gaugelasso train runs/demo/next.toml --out runs/second
    """
    advice = suggest(runs)
    for line in advice.lines:
        say(line)
    # A config that could not be trained is not worth a file.
    Config.from_dict(tomllib.loads(advice.config))
    path = out or home(runs) / "next.toml"
    if exists(path) and not overwrite:
        raise UserError(
            f"config {str(path)!r} already exists; add --overwrite to replace it, "
            "or choose another --out"
        )
    make_folder(path.parent)
    write_text(path, advice.config)
    say(f"next config: {path}")


def info(run: RunPath) -> None:
    """Print the structure of a run's model, layer by layer.

    Example: gaugelasso info runs/demo
    """
    loaded = load_run(run)
    print_structure(loaded, console)
    print_outcome(loaded, console)
