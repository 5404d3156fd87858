"""A Python whose processes start in milliseconds: torch and the package are already imported.

`python` is a program that takes the arguments of Python. It (client.py) passes its
arguments, environment and open files to a server (server.py), which forks the process that does
the work. Signals are forwarded in one direction, the exit status in the other. A process that is
killed takes its counterpart with it, so callers see an ordinary process.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent


@cache
def python() -> str:
    """Return the program. The first call of all pytest workers starts the server.

    It ends with the last of the processes that hold its pipe open for writing.
    """
    folder = _shared_folder()
    program, pipe = folder / "python", folder / "alive"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if pipe.exists():
            os.open(pipe, os.O_WRONLY)  # closed when this process ends
            return str(program)
        program.write_text(f"#!{sys.executable} -IS\n{(_HERE / 'client.py').read_text()}")
        program.chmod(0o755)
        os.mkfifo(pipe)
        end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        os.open(pipe, os.O_WRONLY)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm.server", str(folder / "socket"), str(program)],
            cwd=_HERE.parents[1],
            stdin=end,
            stdout=subprocess.PIPE,
            # Ctrl-C reaches the processes through their clients.
            start_new_session=True,
        )
        os.close(end)
        assert server.stdout
        with server.stdout as stdout:
            assert stdout.readline() == b"ready\n"
        server.returncode = 0  # nobody waits for it: other workers may need it longer
    return str(program)


def _shared_folder() -> Path:
    """One folder for all workers of a pytest session; else one of this process alone."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if session is None:
        return Path(tempfile.mkdtemp(prefix="gaugelasso-"))
    folder = Path(tempfile.gettempdir(), f"gaugelasso-{session}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def worker_of(pid: int) -> int:
    """Return the process that works for a client; the process itself if it is not a client."""
    found = ""
    with contextlib.suppress(FileNotFoundError):
        found = Path(python()).with_name(f"{pid}.worker").read_text()
    return int(found or pid)  # empty: the server is about to write it
