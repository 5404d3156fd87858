"""The command that measures models on held-out data."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gaugelasso.cli.arguments import (
    Changes,
    Device,
    TextTokens,
    check_model_folder,
    keys_as_options,
    parse_changes,
    warn_unfinished,
)
from gaugelasso.cli.output import print_line
from gaugelasso.config import Config, run_config
from gaugelasso.config.base import BaseModel
from gaugelasso.config.imported import imported_config
from gaugelasso.errors import UserError
from gaugelasso.models import Transformer
from gaugelasso.runs.checkpoint import load_model
from gaugelasso.runs.reading import is_imported
from gaugelasso.tasks import TEST, TOKEN_TASKS, TokenText
from gaugelasso.tasks.own import sequences
from gaugelasso.training.evaluation import (
    choose_device,
    evaluate,
    final_figures,
    predictor,
    whole_figures,
)
from gaugelasso.training.resume import warn_changed_code

# With --data, the options that decide keys.
TEXT_OPTIONS = {"task.path": "--data", "task.length": "--length"}


def eval_(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders; with --data imported folders too."),
    ],
    batches: Annotated[int, typer.Option(min=1, help="Number of batches of test data.")] = 64,
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Use all test data of a finite data set."),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Use this text instead, all of it: a file, a folder, or tokens as .npy. For "
            "models with a tokenizer.",
        ),
    ] = None,
    tokens: TextTokens = 0,
    length: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --data: tokens of a window; 0: as in the run, for an imported model 512 or "
            "its context; of several models the shortest.",
        ),
    ] = 0,
    set_: Changes = None,
    device: Device = None,
) -> None:
    """Evaluate the models of runs on test data, or on any text.

    Example: gaugelasso eval runs/demo --batches 256

    Example: gaugelasso eval runs/books --whole --set task.valid=other.txt

    Example: gaugelasso eval bases/smol runs/smaller --data valid.txt --tokens 100000
    """
    if data is None and (tokens or length):
        raise UserError("--tokens and --length belong to --data, which is not given")
    if data is not None and whole:
        raise UserError("--data uses all of the text; remove --whole")
    changes, where = parse_changes(set_), choose_device(device or "auto")
    for run in runs:
        check_model_folder(run)
    typed = {} if data is None else {k: v for k, v in TEXT_OPTIONS.items() if k not in changes}
    with keys_as_options(typed):
        if data is not None and not length and len(runs) > 1:
            length = _shortest(runs, data, changes)
        for run in runs:
            if data is None:
                line = _on_test_data(run, batches, whole, changes, where)
            else:
                line = _on_text(run, data, tokens, length, changes, where)
            warn_unfinished(run)
            print_line(f"{run}: {line}" if len(runs) > 1 else line)


def _on_test_data(
    run: Path, batches: int, whole: bool, changes: dict[str, str], device: str
) -> str:
    if is_imported(run):
        raise UserError(f"{str(run)!r} is imported and has no test data; give a text with --data")
    settings = run_config(run, changes)
    model, task = load_model(run, device), settings.task
    warn_changed_code(settings, run)
    if isinstance(model, Transformer):
        spec, fits = model.initial_spec, sequences(task)
        shorter = isinstance(settings.model, BaseModel) and fits.length < spec.length
        if fits.inputs != spec.inputs or (fits.length != spec.length and not shorter):
            raise UserError(f"{str(run)!r}: the model does not fit this task's length or inputs")
    shown = f"{batches} batches of {settings.train.batch}"
    if whole:
        figures, shown = whole_figures(model, settings, device), "all test data"
    elif isinstance(task, TokenText):
        # Bits per byte of all batches is not the mean of their bits per byte.
        figures = final_figures(model, settings, batches, device, TEST)
        if batches * settings.train.batch > task.whole_windows(TEST):
            shown = "all test data"  # which are fewer, and each counts once
    else:
        loss, metric, _ = evaluate(model, settings, batches, device, stream=TEST)
        figures = {"loss": loss, task.metric_name: metric}
    return describe_figures(figures, shown)


def _shortest(runs: list[Path], data: str, changes: dict[str, str]) -> int:
    """The shortest window of the models; prints it if theirs differ.

    Losses in windows of different lengths cannot be compared.
    """
    tasks = {run: _text_settings(run, data, 0, changes).task for run in runs}
    lengths = {run: task.length for run, task in tasks.items() if isinstance(task, TokenText)}
    shortest = min(lengths.values())
    if shortest < max(lengths.values()):
        named = ", ".join(f"{str(run)!r} {length:,}" for run, length in lengths.items())
        print_line(
            f"windows of {shortest:,} tokens for all models, the shortest of their windows "
            f"({named}); --length gives another"
        )
    return shortest


def _on_text(
    run: Path, data: str, tokens: int, length: int, changes: dict[str, str], device: str
) -> str:
    settings = _text_settings(run, data, length, changes)
    task = settings.task
    assert isinstance(task, TokenText)
    model = load_model(run, device)
    if isinstance(model, Transformer) and task.length > model.initial_spec.length:
        raise UserError(
            f"--length {task.length}: the model of {str(run)!r} has {model.initial_spec.length} "
            "positions"
        )
    figures = task.text_figures(predictor(model, settings, device), device, tokens)
    return describe_figures(figures, describe_text(task, data, tokens))


def _text_settings(run: Path, data: str, length: int, changes: dict[str, str]) -> Config:
    """The config of a run or of an imported model, with this text as the data of its task."""
    if is_imported(run):
        return imported_config(run, data, length, changes)
    settings = run_config(run, changes)
    if not isinstance(settings.task, TokenText):
        raise UserError(
            f"--data needs a run of {' or '.join(map(repr, TOKEN_TASKS))}, or an imported model, "
            f"and {str(run)!r} is of {settings.task_name!r}; use --set with the keys of its task"
        )
    task = replace(
        settings.task, path=data, valid="", split=0.0, length=length or settings.task.length
    )
    return replace(settings, task=task)


def describe_text(task: TokenText, data: str, tokens: int) -> str:
    """The part of a text that was read, and how."""
    part = f"the first {tokens:,} tokens" if tokens else "all"
    return f"{part} of {data!r} in windows of {task.length}"


def describe_figures(figures: dict[str, float], shown: str) -> str:
    told = (f"{name} {_digits(value)}" for name, value in figures.items())
    return f"{'  '.join(told)}  ({shown})"


def _digits(value: float) -> str:
    """Six decimals; of a figure that has few of them, six digits."""
    return f"{value:.6f}" if value == 0 or abs(value) >= 0.1 else f"{value:.6g}"
