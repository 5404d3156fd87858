"""Creates the trainer of a command, and shows where it starts and what came out."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gaugelasso.cli.output import console, print_line
from gaugelasso.compress.result import TargetMissed
from gaugelasso.report.data import load_run
from gaugelasso.report.tables import print_outcome
from gaugelasso.signals import stop_requests
from gaugelasso.training.trainer import Trainer


def build_trainer(*arguments: Any, **named: Any) -> Trainer:
    """Create the trainer. A stop signal interrupts it at once; saved files stay unchanged."""
    with (
        stop_requests() as request,
        request.interruptible("before the first step; nothing was lost"),
    ):
        return Trainer(*arguments, **named)


def print_start(folder: Path, trainer: Trainer) -> None:
    """Tells where --resume starts: with a misspelt folder name it would start a new run."""
    if step := trainer.compressor.steps:
        print_line(f"run folder {str(folder)!r}: resuming after step {step:,}")
    else:
        print_line(f"run folder {str(folder)!r}: no checkpoint to resume from; starting at step 0")


@contextlib.contextmanager
def outcome_shown(folder: Path) -> Iterator[None]:
    """Print what came out of a run after it, also if it missed its target."""
    missed: TargetMissed | None = None
    try:
        yield
    except TargetMissed as error:
        missed = error
    print_outcome(load_run(folder), console)
    print_line(f"run folder: {folder}")
    if missed is not None:
        raise missed
