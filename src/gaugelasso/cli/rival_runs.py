"""What the commands of rival methods share: their source, and how a run is shown."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.baselines.source import Source
from gaugelasso.cli.arguments import choose_existing
from gaugelasso.cli.display import show_progress
from gaugelasso.cli.output import console, print_line
from gaugelasso.cli.trainers import outcome_shown, print_start
from gaugelasso.errors import UserError
from gaugelasso.report.data import check_finished, load_run
from gaugelasso.runs.folder import Existing
from gaugelasso.training.records import Progress
from gaugelasso.training.trainer import Trainer

WORK = typer.Option(help="The work per token to reach, by the accounting of the run.")
Work = Annotated[float | None, WORK]
# Of an output folder, what may be there already, and what is told of the progress.
NewTrainer = Callable[[Path, Existing, Callable[[Progress], None]], Trainer]


def run_rival(
    title: str, new_trainer: NewTrainer, folder: Path, resume: bool, overwrite: bool
) -> None:
    """Make a run, and show it and its outcome."""
    existing = choose_existing(resume, overwrite)
    with (
        outcome_shown(folder),
        show_progress(console, title, folder / "metrics.jsonl") as on_progress,
    ):
        trainer = new_trainer(folder, existing, on_progress)
        if resume:
            print_start(folder, trainer)
        trainer.run()


def check_work(fma: float | None) -> None:
    if fma is not None and not 0 < fma < math.inf:
        raise UserError(f"--fma {fma:g}: must be a finite number above 0")


def check_one_of(fma: float | None, other: str, value: float | None) -> None:
    if (fma is None) == (value is None):
        given = "none is given" if fma is None else "both are given"
        raise UserError(f"--fma and --{other}: give one of them; {given}")
    check_work(fma)


def source_of(run: Path) -> Source:
    """The finished run that a method begins with."""
    check_finished([load_run(run)])
    source = Source.of(run)
    if not source.is_full:
        print_line(f"note: {str(run)!r} is compressed already; the method begins there")
    return source
