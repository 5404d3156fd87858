"""The command check: does the axis table of a model of your own say what the model does?"""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gaugelasso.axes import Compressible
from gaugelasso.checking import STEPS
from gaugelasso.checking import check as check_model
from gaugelasso.cli.output import print_line
from gaugelasso.errors import UserError, first_line
from gaugelasso.plugins import NamedBy, Reference


def check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="FILE:BUILD",
            help="Function without arguments that returns the model, as in my.py:build or "
            "package.module:build.",
        ),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Most steps of the pressed training.")] = STEPS,
) -> None:
    """Check the axis table of a model of your own against what the model computes.

    The file also defines batch(), which returns (inputs, targets), and may define
    loss(outputs, targets). Without a loss it is the cross-entropy for integer targets, else the
    mean square.

    Prints a row for each finding. The exit code is 0 if nothing fails, else 1.

    Example: gaugelasso check examples/encoder.py:build

    Example: gaugelasso check mypackage.models:build --steps 100
    """
    by = NamedBy(Path.cwd())
    reference = Reference.parse("check", model, by)
    built = _called(reference, by)
    if not isinstance(built, Compressible):
        kind = type(built).__name__
        raise reference.error(f"it returns a {kind}, not a gaugelasso.Compressible")
    batch = _called(replace(reference, name="batch"), by)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UserError(f"batch() of {reference.source!r} returns no pair (inputs, targets)")
    try:
        loss = replace(reference, name="loss").load(by)
    except UserError:  # the file defines none
        loss = None
    result = check_model(built, (batch[0], batch[1]), loss, steps=steps)
    print_line(str(result))
    if not result.passed:
        print_line(f"{len(result.failures)} findings to change; see docs/how-to/own-model.md")
        raise typer.Exit(1)


def _called(reference: Reference, by: NamedBy) -> Any:
    """The result of a function of the user's; UserError if it cannot be called or fails."""
    function = reference.load(by)
    if not callable(function):
        raise reference.error(f"it is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise reference.error(f"it must be callable without arguments: {error}") from None
    except ValueError:  # a built-in without a signature
        pass
    try:
        return function()
    except Exception as error:
        raise reference.error(f"it raised {type(error).__name__}: {first_line(error)}") from error
