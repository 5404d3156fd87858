"""The logs of a run: each grows by one row at a time, and a mark identifies its content so far.

A mark is the length of a log and the SHA-256 of its content up to there. A checkpoint stores a
mark of each log, so that a resumed run continues from exactly the rows it had then. The digest
grows with the log: nothing is read again while a run trains.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError, first_line
from gaugelasso.files import durable
from gaugelasso.files.untrusted import open_plain

Mark = dict[str, Any]
RESUMED = "resumed.jsonl"
NAMES = ("metrics.jsonl", "events.jsonl", RESUMED)
_BLOCK = 2**20


class Log:
    """A log that this process alone writes to. OSError if it cannot be written."""

    def __init__(self, path: Path):
        """Start with an empty log: `truncate` removes what the file holds already."""
        self.path = path
        self._bytes, self._digest = 0, hashlib.sha256()

    @classmethod
    def at_mark(cls, path: Path, mark: Mark) -> "Log":
        """Return the log as it was when it was marked; UserError if the file starts otherwise."""
        log = cls(path)
        try:
            with open_plain(path, links=False) as file:
                while block := file.read(min(_BLOCK, mark["bytes"] - log._bytes)):
                    log._update(block)
        except FileNotFoundError:
            pass  # correct if the log was empty when it was marked
        except OSError as error:
            raise UserError(f"{str(path)!r}: cannot be read ({first_line(error)})") from None
        if log._bytes < mark["bytes"]:
            raise UserError(
                f"{str(path)!r}: damaged, {log._bytes:,} bytes where the checkpoint recorded "
                f"{mark['bytes']:,}"
            )
        if log.mark() != mark:
            raise UserError(
                f"{str(path)!r}: damaged, its first {mark['bytes']:,} bytes are not those that the "
                "checkpoint recorded"
            )
        return log

    def _update(self, data: bytes) -> None:
        self._bytes += len(data)
        self._digest.update(data)

    def append(self, row: dict[str, Any]) -> None:
        """Add a row. It is not flushed to the disk before `sync`."""
        line = (json.dumps(row) + "\n").encode()
        durable.append(self.path, line)
        self._update(line)

    def sync(self) -> None:
        """Flush the file to the disk."""
        durable.sync(self.path)

    def truncate(self) -> None:
        """Remove everything in the file after the rows of this log."""
        durable.truncate(self.path, self._bytes)

    def mark(self) -> Mark:
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def is_marks(data: Any) -> bool:
    """Whether the data are one mark for each log."""
    return (
        isinstance(data, dict)
        and data.keys() | {RESUMED} == set(NAMES)  # early versions did not write that log
        and all(_is_mark(each) for each in data.values())
    )


def _is_mark(data: Any) -> bool:
    return (
        isinstance(data, dict)
        and data.keys() == {"bytes", "sha256"}
        and type(data["bytes"]) is int
        and 0 <= data["bytes"] < 2**63  # the range of file sizes
        and isinstance(data["sha256"], str)
        and re.fullmatch("[0-9a-f]{64}", data["sha256"]) is not None
    )
