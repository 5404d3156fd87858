"""Commands that train a model, and that show what it does: train, show."""

import contextlib
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from gaugelasso.cli.arguments import (
    Changes,
    ConfigPath,
    Device,
    Out,
    Overwrite,
    Resume,
    RunPath,
    choose_existing,
    load_settings,
    warn_unfinished,
)
from gaugelasso.cli.display import show_progress
from gaugelasso.cli.output import console, print_line
from gaugelasso.cli.show import show_divisions
from gaugelasso.cli.tensorboard import find_writer, tensorboard
from gaugelasso.cli.trainers import build_trainer, outcome_shown, print_start
from gaugelasso.config import Config
from gaugelasso.distributed import Team, join
from gaugelasso.runs.checkpoint import load_structure
from gaugelasso.runs.folder import REFERENCE, Existing
from gaugelasso.runs.reading import exists
from gaugelasso.training.evaluation import choose_device
from gaugelasso.training.reference import needs_reference, with_reference
from gaugelasso.training.reference_file import load_reference


def train(
    config: ConfigPath,
    set_: Changes = None,
    out: Out = None,
    device: Device = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    structure: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN|JSON",
            help="Begin with this structure and new weights, instead of the model of CONFIG.",
        ),
    ] = None,
    board: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Write figures and pictures for TensorBoard while training."
        ),
    ] = False,
) -> None:
    """Train and compress one model.

    The run folder receives the logs, the checkpoints and the summary.

    Example: gaugelasso train configs/retrieval/demo.toml --out runs/demo --set train.seed=7

    Example: gaugelasso train configs/retrieval/demo.toml --out runs/demo --resume

    Example: gaugelasso train configs/ff31/small.toml --out runs/near --set target.above_full=0.1

    Example: gaugelasso train configs/retrieval/demo.toml --out runs/again --structure runs/demo

    Example: gaugelasso train configs/retrieval/demo.toml --out runs/demo --tensorboard
    """
    if board:
        find_writer()  # raises if the extra is missing, before anything is written
    begin_with = load_structure(structure) if structure else None
    settings = load_settings(config, set_, device)
    folder = out or Path("runs") / f"{config.stem}-seed{settings.train.seed}"
    title = f"{settings.task_name}, seed {settings.train.seed}"
    existing, where = choose_existing(resume, overwrite), choose_device(settings.train.device)
    team = join(where.startswith("cuda"), settings.train.rank_timeout)
    first = needs_reference(settings)
    if team.rank:  # only rank 0 prints
        logging.disable(logging.WARNING)
        if first:
            given = (settings, folder, existing, None, team, begin_with, build_trainer)
            settings, existing = with_reference(*given), "resume"
        build_trainer(settings, folder, existing, team=team, structure=begin_with).run()
        team.close()
        return
    if first:
        settings = _measure_reference(settings, folder, existing, team, begin_with, title)
        existing = "resume"
    with contextlib.ExitStack() as stack:
        stack.enter_context(outcome_shown(folder))
        on_progress = stack.enter_context(show_progress(console, title, folder / "metrics.jsonl"))
        if board:
            on_progress = stack.enter_context(tensorboard(folder, on_progress))
        trainer = build_trainer(settings, folder, existing, on_progress, team, begin_with)
        if resume:
            print_start(folder, trainer)
        trainer.run()
        team.close()


def _measure_reference(
    settings: Config, folder: Path, existing: Existing, team: Team, structure: Any, title: str
) -> Config:
    """Train the full model first, with a progress line of its own, where a run needs its loss."""
    reference = folder / REFERENCE
    finished = existing == "resume" and exists(reference / "summary.json")
    if settings.target.reference is None and not finished:
        print_line(f"first the reference: the full model without pressure, in {str(reference)!r}")
    with show_progress(console, f"{title}, reference", reference / "metrics.jsonl") as on_progress:
        given = (settings, folder, existing, on_progress, team, structure, build_trainer)
        settings = with_reference(*given)
    found = load_reference(folder)
    if found is not None and settings.target.above_full is not None:
        print_line(found.named(settings.target.above_full))
    return settings


def show(
    run: RunPath,
    problems: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems.")] = 0,
    device: Device = None,
) -> None:
    """Print how the model of an ff31 run solves polynomial divisions, step by step.

    Example: gaugelasso show runs/division --problems 3
    """
    lines = [*show_divisions(run, problems, seed, choose_device(device or "auto"))]
    warn_unfinished(run)
    for line in lines:
        print_line(line)
