"""The error for mistakes that the user can fix: it names what is wrong and what would be right."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


class UserError(ValueError):
    """The command line prints it as one line, without a traceback, and exits with this code."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, or the name of its type."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Put the name of the file before the message of a UserError raised inside."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{str(path)!r}: {error}") from None
