"""A new folder, as of an export or an import: complete, or not there."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from gaugelasso.errors import UserError, first_line
from gaugelasso.files.durable import rename, sync
from gaugelasso.runs.writing import check_name, make_folder
from gaugelasso.signals import StopRequest, stop_requests


def check_free(out: Path) -> None:
    """UserError if there is anything of this name."""
    check_name(out)
    if out.exists() or out.is_symlink():
        raise UserError(f"output {str(out)!r} already exists; remove it, or choose another --out")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder to write to, which becomes `out` if nothing is raised.

    A signal that asks to stop raises Stopped at once, and the temporary folder is removed.
    """
    check_free(out)
    # Until the temporary folder is gone: a second signal must not interrupt its removal.
    with (
        stop_requests() as request,
        _made_aside(out, request) as aside,
        request.interruptible(f"before {str(out)!r} was complete; nothing was written"),
    ):
        yield aside


@contextlib.contextmanager
def _made_aside(out: Path, request: StopRequest) -> Iterator[Path]:
    parent = out.absolute().parent
    made = not parent.exists()
    make_folder(parent)
    # Of this process alone: nothing that is there is touched.
    aside = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        aside.mkdir()
    except OSError as error:
        raise UserError(f"output {str(aside)!r} cannot be made: {first_line(error)}") from None
    try:
        yield aside
        for path in [*aside.rglob("*"), aside]:
            sync(path)
        check_free(out)  # another process may have been faster
        rename(aside, out)
    except OSError as error:
        raise UserError(f"output {str(out)!r} cannot be written: {first_line(error)}") from None
    finally:
        with request.cleaning():
            shutil.rmtree(aside, ignore_errors=True)
            if made and not out.exists():
                with contextlib.suppress(OSError):  # something else is in it
                    parent.rmdir()
