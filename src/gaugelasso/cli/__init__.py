"""The command line. Parses, calls, prints; errors that are the user's to mend exit with 2.

One file a group of commands, which do not know each other.
"""

import contextlib
import faulthandler
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

from gaugelasso.cli.benchmarks import bench
from gaugelasso.cli.models import eval_, generate, show, train
from gaugelasso.cli.output import check_output_complete, console, errors, steady_streams
from gaugelasso.cli.reports import advise, info, pareto, report
from gaugelasso.cli.sweeps import sweep
from gaugelasso.distributed import started_as
from gaugelasso.errors import UserError
from gaugelasso.runs.writing import write_json
from gaugelasso.signals import Stopped
from gaugelasso.version import __version__

# A table, for the order of the help page is not to hang on that of imports.
COMMANDS: Mapping[str, Callable[..., None]] = {
    "train": train,
    "eval": eval_,
    "generate": generate,
    "report": report,
    "pareto": pareto,
    "advise": advise,
    "info": info,
    "show": show,
    "sweep": sweep,
    "bench": bench,
}

app = typer.Typer(
    name="gaugelasso",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Shrink a transformer while it trains: name the loss you need, keep the smallest "
    "dense network that holds it.",
)
for name, command in COMMANDS.items():
    app.command(name)(command)


def _print_version(asked: bool) -> None:
    if asked:
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
    with contextlib.suppress(UserError):  # which may be what is to be said
        return started_as()[0]
    return 0


def _tell_launcher(message: str) -> None:
    """Leave it where torchrun looks for the cause, which it prints last, under its traceback."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        info = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(UserError):  # it has been said already
            write_json(Path(path), {"message": {"message": message, "extraInfo": info}})


def set_up_process() -> None:
    """What torch should know before its first call, and what is left to see if it crashes."""
    if sys.__stderr__ and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)
    # Lets freed blocks of a GPU serve tensors of other shapes.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # On ARM each product of matrices is compiled for its shape. Shapes that a cut has made
    # obsolete need no room: torch would keep a thousand.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns of this call of its own
        torch.set_float32_matmul_precision("high")


def _command() -> None:
    try:
        with steady_streams():
            app()  # ends by SystemExit, always
    except SystemExit as end:
        if end.code in (None, 0, 2):  # 2: also the help page of a command without arguments
            check_output_complete()
        raise


def main() -> None:
    """Entry point: user errors become one line, and an exit code of their own."""
    set_up_process()
    try:
        _command()
    except (UserError, Stopped) as error:
        errors.print("[bold red]error:[/]", end=" ")
        if rank := _rank():
            errors.print(f"rank {rank}:", end=" ", highlight=False)
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        _tell_launcher(str(error))
        raise SystemExit(error.exit_code) from None
    except Exception:
        _tell_launcher(traceback.format_exc())
        raise
