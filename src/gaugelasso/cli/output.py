"""The console of all commands. A failed write to standard output does not stop a command."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, Literal, cast

from rich.console import Console

from gaugelasso.errors import UserError


class _NullStream(io.TextIOBase):
    """Stands in for a standard stream that was closed before Python started."""

    def write(self, text: str) -> int:
        return len(text)


_NULL_STREAM = _NullStream()
# The errors of writing to a pipe or terminal whose reader has closed it.
_READER_CLOSED = {errno.EPIPE, errno.EIO}


class _TolerantStream:
    """A standard stream that ignores failed writes and keeps the first error.

    A closed pipe or a full disk must not end a run that has been training for hours. The stream
    is looked up at every call, because tests and rich replace sys.stdout.
    """

    def __init__(self, name: Literal["stdout", "stderr"]):
        self._name = name
        self._inner: Any = None  # the stream that this one replaces, while it does
        self.error: OSError | None = None

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
    def rich_proxied_file(self) -> "_TolerantStream":
        """The attribute by which rich finds the stream behind the proxy of a live panel."""
        return self

    @property
    def _stream(self) -> Any:
        stream = getattr(sys, self._name)
        stream = getattr(stream, "rich_proxied_file", stream)
        if stream is self:
            stream = self._inner
        return stream or _NULL_STREAM  # closed before Python began

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        stream = self._stream
        with self._keep_error():
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
        return len(text)

    def flush(self) -> None:
        with self._keep_error():
            self._stream.flush()

    @contextlib.contextmanager
    def _keep_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            # Buffered text would fail again when Python flushes at exit: redirect it.
            with contextlib.suppress(OSError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self._stream.fileno())


_stdout, _stderr = _TolerantStream("stdout"), _TolerantStream("stderr")
console = Console(file=cast(IO[str], _stdout))
errors = Console(file=cast(IO[str], _stderr))


@contextlib.contextmanager
def steady_streams() -> Iterator[None]:
    """Help pages and usage errors, which typer writes, must not end in a traceback either."""
    with _stdout.installed(), _stderr.installed():
        yield


def print_line(text: str) -> None:
    """Print text without markup: names chosen by users may contain brackets."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def check_output_complete() -> None:
    """UserError if standard output could not be written. A reader that closed it is no error."""
    error = _stdout.error
    if error and error.errno not in _READER_CLOSED:
        raise UserError(
            f"standard output cannot be written ({error.strerror}): the command has finished, "
            "but the output is incomplete"
        )
