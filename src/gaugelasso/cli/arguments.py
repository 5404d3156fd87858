"""Arguments that several commands share, and how they are parsed."""

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.config import Config, load_config
from gaugelasso.errors import UserError
from gaugelasso.runs.folder import Existing
from gaugelasso.runs.reading import exists, is_folder, is_imported, read_json
from gaugelasso.training.evaluation import choose_device

_log = logging.getLogger(__name__)

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
TextTokens = Annotated[
    int, typer.Option(min=0, help="With --data: only so many tokens of it; 0: all.")
]
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


@contextlib.contextmanager
def keys_as_options(options: Mapping[str, str]) -> Iterator[None]:
    """Let a UserError from inside name options in place of the keys that they decide.

    `options` has the option of each key: `task.path = 'a'` becomes `--data 'a'`.
    """
    try:
        yield
    except UserError as error:
        message = str(error)
        for key, option in options.items():
            message = re.sub(rf"\b{re.escape(key)}\b( =(?= ))?", option, message)
        raise type(error)(message) from None


def check_model_folder(folder: Path) -> None:
    """UserError if it is a folder that is easily taken for a run or an imported model."""
    if exists(folder) and not is_folder(folder):
        if folder.suffix == ".gguf":
            raise UserError(f"{str(folder)!r} is a GGUF file; {_import_first(folder)}")
        raise UserError(f"{str(folder)!r} is a file; give a run folder, or an imported one")
    if not exists(folder / "config.json"):
        for name, what in (("run", "its run"), ("base", "not trained yet; its imported model")):
            if exists(folder / name / "config.json"):
                raise UserError(
                    f"{str(folder)!r} is a folder of gaugelasso compress: {what} is "
                    f"{str(folder / name)!r}; give that folder"
                )
        return
    config = read_json(folder / "config.json", finite=False)
    if not isinstance(config, dict) or "architectures" not in config:
        return
    if config.get("model_type") == "gaugelasso":
        raise UserError(
            f"{str(folder)!r} is an export for transformers; give the run folder that was exported"
        )
    raise UserError(f"{str(folder)!r} is a Hugging Face folder; {_import_first(folder)}")


def warn_unfinished(folder: Path) -> None:
    """Warn if the model of a run is not its last one."""
    if not is_imported(folder) and not exists(folder / "summary.json"):
        _log.warning(
            "warning: %r is not finished: summary.json is missing; this is the model of its newest "
            "checkpoint", str(folder),
        )  # fmt: skip


def _import_first(source: Path) -> str:
    imported = Path("bases") / source.absolute().stem
    return f"run gaugelasso import {source} --out {imported} first, and give {str(imported)!r}"
