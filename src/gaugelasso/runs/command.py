"""The command line that a figure came from."""

import shlex
import sys
from pathlib import Path


def command() -> str:
    """Return the command line of this process, as one would type it."""
    spec, given = getattr(sys.modules["__main__"], "__spec__", None), sys.argv[:1] or [""]
    program = Path(given[0])
    if given[0] in ("", "-c") or program.stem == "ipykernel_launcher":
        return "python"  # its code is not known
    if program.stem == "gaugelasso" or (spec and spec.name == "gaugelasso.__main__"):
        words = ["gaugelasso"]
    elif spec:
        words = ["python", "-m", spec.name.removesuffix(".__main__")]
    else:
        words = ["python", given[0]]
    return shlex.join([*words, *sys.argv[1:]])
