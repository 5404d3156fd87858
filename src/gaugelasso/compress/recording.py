"""Who opens the run folder of a run in a loop of your own.

The method writes no files. A package above it registers how a folder's name becomes a recorder.
"""

import os
from collections.abc import Callable

from gaugelasso.compress.pilot import Recorder
from gaugelasso.plugins.modules import check_may_train

Opener = Callable[[str | os.PathLike[str], bool], Recorder]
_opener: list[Opener] = []


def register_opener(opener: Opener) -> None:
    """Set what opens a recorder, of a folder's name and whether to go on with it."""
    _opener[:] = [opener]


def open_recorder(
    record: str | os.PathLike[str] | Recorder | None, resume: bool
) -> Recorder | None:
    """The recorder itself, or that of a run folder; UserError in an import."""
    check_may_train()
    if isinstance(record, str | os.PathLike):
        return _opener[0](record, resume)
    if record is not None and not hasattr(record, "prepare"):
        raise TypeError(f"record = {record!r}: must be the path of a folder")
    return record
