"""A function that the server calls in a process of its own, seen as `multiprocessing` shows one."""

import contextlib
import os
import pickle
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import warm

_ROOT = Path(__file__).parents[2]
# Leaves without taking torch apart, as the processes of `multiprocessing` do.
_CALL = """
import os, pickle, sys
work, arguments = pickle.loads(bytes.fromhex(sys.argv[1]))
code = 0
try:
    work(*arguments)
except SystemExit as stopped:
    code = stopped.code or 0
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""


class Process:
    """Calls `work(*arguments)`, both of which are pickled, from now on."""

    def __init__(self, work: Callable[..., None], *arguments: Any):
        command = [warm.python(), "-c", _CALL, pickle.dumps((work, arguments)).hex()]
        self._client = subprocess.Popen(command, cwd=_ROOT)

    @property
    def pid(self) -> int:
        """The process that does the work."""
        return warm.worker_of(self._client.pid)

    @property
    def exitcode(self) -> int | None:
        """None while it is alive; negative for a signal."""
        return self._client.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, seconds: float | None = None) -> None:
        """Wait for its end, at most for so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._client.wait(seconds)

    def kill(self) -> None:
        """SIGKILL to the process that does the work, not to the one that stands for it.

        That one ends with it; the other way round, the work would go on for a moment.
        """
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
