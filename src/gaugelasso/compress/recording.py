"""What a run in a loop of your own reports to, and who opens the run folder for it.

The method writes no files. A package above it registers how a folder's name becomes a recorder.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from gaugelasso.axes import Compressible
from gaugelasso.compress.driver import Log
from gaugelasso.compress.result import Result

if TYPE_CHECKING:
    from gaugelasso.compress.pilot import Pilot


class Recorder(Log, Protocol):
    """Writes what a pilot does, and can bring it back to where an earlier run was stopped."""

    def prepare(self, model: Compressible) -> None:
        """Give the model the state to go on with, before anything is built on it."""

    def begin(self, pilot: "Pilot") -> None:
        """The run starts, or goes on."""

    def finished(self, result: Result) -> None:
        """The run is over."""


Opener = Callable[[str | os.PathLike[str], bool], Recorder]
_opener: list[Opener] = []


def register_opener(opener: Opener) -> None:
    """Set what opens a recorder, of a folder's name and whether to go on with it."""
    _opener[:] = [opener]


def open_recorder(
    record: "str | os.PathLike[str] | Recorder | None", resume: bool
) -> Recorder | None:
    """The recorder itself, or that of a run folder."""
    if not isinstance(record, str | os.PathLike):
        return record
    return _opener[0](record, resume)
