"""Imported by servers before they fork: all that a run imports, so that no fork imports it."""

import contextlib
import gc
import io

import numpy.random  # noqa: F401

from gaugelasso import cli

# Typer and rich import some of their modules when a command is called.
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    cli.app(["info", "--help"])
gc.collect()
gc.freeze()  # else a garbage collection in a fork would copy all pages
