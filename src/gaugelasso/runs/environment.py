"""The environment of a run: the versions, hardware and source commit that its figures depend on."""

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy
import torch

from gaugelasso.kernels.hardware import hardware
from gaugelasso.runs.command import command
from gaugelasso.version import __version__


def environment(device: str) -> dict[str, Any]:
    """Return what is needed to repeat a measurement on this device."""
    return {
        "gaugelasso": __version__,
        "commit": _commit(),
        "command": command(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def _commit() -> str | None:
    """Return the commit of this package's source, with '+' if files were changed since.

    None if the source is not in a Git repository. The environment variable GAUGELASSO_COMMIT
    gives the commit where the code was copied without its repository.
    """
    if commit := os.environ.get("GAUGELASSO_COMMIT"):
        return commit
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        return head + ("+" if git("status", "--porcelain", "--", str(package)) else "")
    except (OSError, subprocess.CalledProcessError):
        return None
