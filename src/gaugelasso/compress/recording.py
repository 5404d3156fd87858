"""What a run in a loop of your own reports to, and who opens the run folder for it.

The method writes no files. A package above it registers how a folder's name becomes a recorder.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from gaugelasso.compress.events import Event
from gaugelasso.compress.result import Result

if TYPE_CHECKING:
    from gaugelasso.compress.pilot import Pilot


class Recorder(Protocol):
    """Writes what a pilot does, and can bring it back to where an earlier run was stopped."""

    def begin(self, pilot: "Pilot") -> None: ...

    def event(self, event: Event) -> None: ...

    def advanced(self, losses: list[float]) -> None: ...

    def finished(self, result: Result) -> None: ...


Opener = Callable[[str | os.PathLike[str]], Recorder]
_opener: list[Opener] = []


def register_opener(opener: Opener) -> None:
    """Set what opens a recorder of a folder's name."""
    _opener[:] = [opener]


def open_recorder(record: "str | os.PathLike[str] | Recorder") -> Recorder:
    """The recorder itself, or that of a run folder."""
    if not isinstance(record, str | os.PathLike):
        return record
    return _opener[0](record)
