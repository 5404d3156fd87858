"""The error for mistakes that the user can fix: it names what is wrong and what would be right."""

import contextlib
import re
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


# What torch says in a plain RuntimeError on a CPU, and C++ where nobody asks how much.
_OUT_OF_MEMORY = ("not enough memory", "out of memory", "bad_alloc", "can't allocate memory")


def out_of_memory(error: Exception) -> str:
    """What an error says about memory that was missing; empty if it is another error."""
    text = str(error)
    said = isinstance(error, RuntimeError) and any(each in text for each in _OUT_OF_MEMORY)
    if not said and not isinstance(error, MemoryError):
        return ""
    found = re.search(r"allocate ([\d.]+) (bytes|[KMGT]iB)", text)
    needed = f" ({_amount(found[1], found[2])} more were needed)" if found else ""
    return (
        f"out of memory{needed}: give a smaller batch, or shorter sequences (train.batch with more "
        "train.accumulate, task.length, or --batch and --length of the command)"
    )


def _amount(number: str, unit: str) -> str:
    return f"{int(number) / 1e9:.3g} GB" if unit == "bytes" else f"{number} {unit}"


@contextlib.contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Put the name of the file before the message of a UserError raised inside."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{str(path)!r}: {error}") from None
