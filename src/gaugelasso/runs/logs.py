"""The logs of a run: each grows by a row at a time, and is known again by its mark.

A mark is the length of a log at some moment and the SHA-256 of all until there. A checkpoint
keeps one of each, so that a run goes on from the very rows it had written by then. Both grow
with the log: nothing is read again while a run goes on.
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
    """A log that is being written, by nobody else. OSError where it cannot be."""

    def __init__(self, path: Path):
        """Nothing is known of what is there: `append` adds to it, `cut` removes it."""
        self.path = path
        self._bytes, self._digest = 0, hashlib.sha256()

    @classmethod
    def known(cls, path: Path, mark: Mark) -> "Log":
        """The log as it was when it was marked; UserError where the file begins otherwise."""
        log = cls(path)
        try:
            with open_plain(path, links=False) as file:
                while block := file.read(min(_BLOCK, mark["bytes"] - log._bytes)):
                    log._hear(block)
        except FileNotFoundError:
            pass  # so it has no bytes, which may be as many as it had
        except OSError as error:
            raise UserError(f"{str(path)!r}: cannot be read ({first_line(error)})") from None
        if log._bytes < mark["bytes"]:
            raise UserError(
                f"{str(path)!r}: damaged, {log._bytes:,} bytes where the checkpoint knows "
                f"{mark['bytes']:,}; put it back as it was, or start anew with --overwrite"
            )
        if log.mark() != mark:
            raise UserError(
                f"{str(path)!r}: damaged, its first {mark['bytes']:,} bytes are not those that the "
                "checkpoint knows; put it back as it was, or start anew with --overwrite"
            )
        return log

    def _hear(self, data: bytes) -> None:
        self._bytes += len(data)
        self._digest.update(data)

    def append(self, row: dict[str, Any]) -> None:
        line = (json.dumps(row) + "\n").encode()
        durable.append(self.path, line)
        self._hear(line)

    def sync(self) -> None:
        """Flush it to the disk."""
        durable.sync(self.path)

    def cut(self) -> None:
        """Remove what is in the file beyond what is known."""
        durable.truncate(self.path, self._bytes)

    def mark(self) -> Mark:
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def is_marks(data: Any) -> bool:
    """Whether this is a mark for each of the logs."""
    return (
        isinstance(data, dict)
        and data.keys() | {RESUMED} == set(NAMES)  # which early versions did not write
        and all(_is_mark(each) for each in data.values())
    )


def _is_mark(data: Any) -> bool:
    return (
        isinstance(data, dict)
        and data.keys() == {"bytes", "sha256"}
        and type(data["bytes"]) is int
        and 0 <= data["bytes"] < 2**63  # as many as a file can have
        and isinstance(data["sha256"], str)
        and re.fullmatch("[0-9a-f]{64}", data["sha256"]) is not None
    )
