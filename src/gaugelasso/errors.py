"""The error that is the user's to mend: it names what is wrong and what would be right."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


class UserError(ValueError):
    """Shown without a traceback by the command line, which then exits with code 2."""

    exit_code = 2


def first_line(error: Exception) -> str:
    """Of another's error, what fits into a line of ours: its first, or its type's name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """What is found wrong inside, told with the name of the file it came from."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{str(path)!r}: {error}") from None
