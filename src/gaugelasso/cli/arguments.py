"""Arguments that several commands share, and how they are parsed."""

from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.config import Config, load_config
from gaugelasso.errors import UserError
from gaugelasso.runs.folder import Existing
from gaugelasso.training.evaluation import choose_device

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration file (TOML).")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
RunPaths = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Run folders, or folders that contain run folders."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one key of the configuration, e.g. train.steps=2000. May be repeated.",
    ),
]
Device = Annotated[str | None, typer.Option(help="Device: auto, cpu or cuda.")]
Out = Annotated[Path | None, typer.Option(help="Output folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume an existing run folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing run folder.")]


def load_settings(
    path: Path, changes: list[str] | None, device: str | None, check_device: bool = True
) -> Config:
    """The config after changes. With `check_device`, UserError if its device is missing here."""
    pairs = parse_changes(changes)
    if device is not None:
        pairs["train.device"] = device
    settings = load_config(path, pairs)
    if check_device:
        choose_device(settings.train.device)
    return settings


def parse_changes(changes: list[str] | None, device: str | None = None) -> dict[str, str]:
    """The values of --set by key, not yet parsed; with --device as train.device."""
    pairs: dict[str, str] = {}
    for change in changes or []:
        key, equals, value = change.partition("=")
        if not equals:
            raise UserError(f"--set {change!r}: write it as key=value, e.g. train.steps=2000")
        pairs[key.strip()] = value.strip()
    return pairs | ({"train.device": device} if device else {})


def choose_existing(resume: bool, overwrite: bool) -> Existing:
    """What to do with an existing run folder."""
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other; give only one of them")
    return "resume" if resume else "overwrite" if overwrite else "refuse"
