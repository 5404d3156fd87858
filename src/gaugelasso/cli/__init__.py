"""The command line: parses arguments, calls the other packages and prints their results.

Each file holds one group of commands and does not import the other groups. An error that the
user can fix becomes one line and a nonzero exit code.
"""

import contextlib
import faulthandler
import inspect
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer

from gaugelasso.cli.baselines import baseline
from gaugelasso.cli.benchmarks import bench
from gaugelasso.cli.checks import check
from gaugelasso.cli.cofi import cofi
from gaugelasso.cli.comparisons import compare
from gaugelasso.cli.compression import compress
from gaugelasso.cli.controls import retrain
from gaugelasso.cli.evaluation import eval_
from gaugelasso.cli.exports import export
from gaugelasso.cli.generation import generate
from gaugelasso.cli.imports import import_
from gaugelasso.cli.models import show, train
from gaugelasso.cli.output import check_output_complete, console, errors, steady_streams
from gaugelasso.cli.profiles import profile
from gaugelasso.cli.reports import advise, info, pareto, report
from gaugelasso.cli.rivals import prune, torch_pruning
from gaugelasso.cli.squeezing import squeeze
from gaugelasso.cli.sweeps import sweep
from gaugelasso.distributed import started_as
from gaugelasso.errors import UserError, out_of_memory
from gaugelasso.runs.writing import write_json
from gaugelasso.signals import Stopped
from gaugelasso.version import __version__

# In the order of the help page.
COMMANDS: Mapping[str, Callable[..., None]] = {
    "train": train,
    "eval": eval_,
    "generate": generate,
    "export": export,
    "import": import_,
    "compress": compress,
    "report": report,
    "pareto": pareto,
    "compare": compare,
    "advise": advise,
    "info": info,
    "show": show,
    "sweep": sweep,
    "baseline": baseline,
    "squeeze": squeeze,
    "retrain": retrain,
    "prune": prune,
    "cofi": cofi,
    "torch-pruning": torch_pruning,
    "bench": bench,
    "profile": profile,
    "check": check,
}

app = typer.Typer(
    name="gaugelasso",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Shrink a transformer while it trains: set the loss you need, and keep the smallest "
    "dense network that reaches it.\n\n"
    "Example: gaugelasso train configs/retrieval/demo.toml --out runs/demo",
)


def _help_of(command: Callable[..., None]) -> str:
    """The docstring with a line for each paragraph: the help page breaks lines at its width."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


for name, command in COMMANDS.items():
    app.command(name, help=_help_of(command))(command)


def _print_version(requested: bool) -> None:
    if requested:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def _rank() -> int:
    # Invalid rank variables raise the same error in the command itself, which reports it.
    with contextlib.suppress(UserError):
        return started_as()[0]
    return 0


def _write_launcher_error(message: str) -> None:
    """Write the error to the file from which torchrun prints the cause of a failure."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        info = {"py_callstack": message, "timestamp": str(int(time.time()))}
        # The error is on standard error already; this copy is optional.
        with contextlib.suppress(UserError):
            write_json(Path(path), {"message": {"message": message, "extraInfo": info}})


def _print_error(message: str) -> None:
    """One line on standard error, and a copy for the launcher."""
    errors.print("[bold red]error:[/]", end=" ")
    if rank := _rank():
        errors.print(f"rank {rank}:", end=" ", highlight=False)
    errors.print(message, markup=False, highlight=False, soft_wrap=True)
    _write_launcher_error(message)


def set_up_process() -> None:
    """Set torch's options before its first call, and print a stack trace on a crash."""
    if sys.__stderr__ and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)
    # Shrinking tensors fragment GPU memory; expandable segments reuse freed blocks.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # On ARM, oneDNN compiles one kernel per matrix shape. Each cut makes shapes obsolete, so a
    # smaller cache than the default is enough.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns about its own API here
        torch.set_float32_matmul_precision("high")


def _command() -> None:
    try:
        with steady_streams():
            app()  # always raises SystemExit
    except SystemExit as end:
        if end.code in (None, 0, 2):  # 2: also the help page of a command without arguments
            check_output_complete()
        raise


def main() -> None:
    """Entry point: a user error becomes one line on standard error and an exit code."""
    set_up_process()
    try:
        _command()
    except (UserError, Stopped) as error:
        _print_error(str(error))
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        if message := out_of_memory(error):
            _print_error(message)
            raise SystemExit(UserError.exit_code) from None
        _write_launcher_error(traceback.format_exc())
        raise
