"""Arguments that commands share, and what is made of them."""

from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.config import Config, load_config
from gaugelasso.errors import UserError
from gaugelasso.runs.folder import Existing
from gaugelasso.training.evaluation import choose_device

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
RunPaths = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders with runs in them.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. train.steps=2000."),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Out = Annotated[Path | None, typer.Option(help="Output folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an existing run folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing run folder.")]


def load_settings(
    path: Path, changes: list[str] | None, device: str | None, here: bool = True
) -> Config:
    """The settings; if they are to run `here`, their device must be."""
    pairs = parse_changes(changes)
    if device is not None:
        pairs["train.device"] = device
    settings = load_config(path, pairs)
    if here:
        choose_device(settings.train.device)
    return settings


def parse_changes(changes: list[str] | None) -> dict[str, str]:
    """Values of --set by key, still as text."""
    pairs: dict[str, str] = {}
    for change in changes or []:
        key, equals, value = change.partition("=")
        if not equals:
            raise UserError(f"--set {change!r}: write it as key=value, e.g. train.steps=2000")
        pairs[key.strip()] = value.strip()
    return pairs


def choose_existing(resume: bool, overwrite: bool) -> Existing:
    """What is to become of a run folder that is there already."""
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other")
    return "resume" if resume else "overwrite" if overwrite else "refuse"
