"""A Python whose processes start in milliseconds: torch and the package are already imported.

`python` is a program that takes the arguments of Python. It (client.py) passes its
arguments, environment and open files to a server (server.py), which forks the process that does
the work. Signals are forwarded in one direction, the exit status in the other. A process that is
killed takes its counterpart with it, so callers see an ordinary process.
"""

import atexit
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent


@cache
def python() -> str:
    """Return the program. Its server starts at the first call and ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="gaugelasso-"))
    program, address = folder / "python", folder / "socket"
    program.write_text(f"#!{sys.executable} -IS\n{(_HERE / 'client.py').read_text()}")
    program.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm.server", str(address), str(program)],
        cwd=_HERE.parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C reaches the processes through their clients.
        start_new_session=True,
    )
    assert server.stdin
    assert server.stdout
    assert server.stdout.readline() == b"ready\n"
    atexit.register(server.wait)
    atexit.register(server.stdin.close)
    atexit.register(server.stdout.close)
    return str(program)


def worker_of(pid: int) -> int:
    """Return the process that works for a client; the process itself if it is not a client."""
    file = Path(python()).with_name(f"{pid}.worker")
    return int(file.read_text()) if file.exists() else pid
