"""What commands say, on one console. Where nobody can hear it, work goes on."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, Literal, cast

from rich.console import Console

from gaugelasso.errors import UserError


class _Nowhere(io.TextIOBase):
    """Where nothing listens."""

    def write(self, text: str) -> int:
        return len(text)


_NOWHERE = _Nowhere()
# What a reader leaves that has gone, be it a pipe's or a terminal.
_GONE = {errno.EPIPE, errno.EIO}


class _Steady:
    """A standard stream as it is at the moment, if there is one; it breaks without a word.

    A reader that is gone or a full disk must not cost a run that has been going for hours.
    """

    def __init__(self, name: Literal["stdout", "stderr"]):
        self._name = name
        self._inner: Any = None  # the stream that this one stands in for, while it does
        self.trouble: OSError | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Put this in the place of the standard stream, for libraries that write to it directly."""
        self._inner = getattr(sys, self._name)
        setattr(sys, self._name, self)
        try:
            yield
        finally:
            setattr(sys, self._name, self._inner)

    @property
    def rich_proxied_file(self) -> "_Steady":
        """By this rich finds what is behind a stream; a live panel puts itself before ours."""
        return self

    @property
    def _stream(self) -> Any:
        stream = getattr(sys, self._name)
        stream = getattr(stream, "rich_proxied_file", stream)
        if stream is self:
            stream = self._inner
        return stream or _NOWHERE  # closed before Python began

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        stream = self._stream
        with self._enduring():
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
        return len(text)

    def flush(self) -> None:
        with self._enduring():
            self._stream.flush()

    @contextlib.contextmanager
    def _enduring(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.trouble = self.trouble or error
            # What is still to be written, at the latest when Python ends, goes where all may.
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


_stdout, _stderr = _Steady("stdout"), _Steady("stderr")
console = Console(file=cast(IO[str], _stdout))
errors = Console(file=cast(IO[str], _stderr))


@contextlib.contextmanager
def steady_streams() -> Iterator[None]:
    """Help pages and usage errors, which typer writes, must not end in a traceback either."""
    with _stdout.installed(), _stderr.installed():
        yield


def say(text: str) -> None:
    """A plain line: names that users chose may look like markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def check_output_complete() -> None:
    """UserError if some of it could not be written. A reader that has had enough is no error."""
    trouble = _stdout.trouble
    if trouble and trouble.errno not in _GONE:
        raise UserError(
            f"standard output cannot be written ({trouble.strerror}): all was done, "
            "but what was to be said of it is not complete"
        )
