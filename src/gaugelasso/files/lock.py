"""A lock that lets one process at a time write to a folder.

It is a lock of the kernel (flock), which ends with its process. A lock file that a dead process
left behind therefore blocks no other process.
"""

import contextlib
import fcntl
import os
import time
import weakref
from pathlib import Path

from gaugelasso.errors import UserError

NAME = "run.lock"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
# Another process may hold the lock for a moment, only to test it: wait that long and try again.
_WAIT_S, _RETRY_S = 1.0, 0.05


class FolderLock:
    """Held from construction to `release`, or to the end of the process."""

    def __init__(self, folder: Path):
        self.path = folder / NAME
        descriptor = self._acquire()
        self._close = weakref.finalize(self, os.close, descriptor)
        with contextlib.suppress(OSError):  # the PID is for messages only; a full disk still locks
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())

    def _acquire(self) -> int:
        until = time.monotonic() + _WAIT_S
        while True:
            try:
                descriptor = os.open(self.path, _FLAGS, 0o666)
            except OSError as error:
                where = str(self.path.parent)
                raise UserError(f"output {where!r} cannot be written: {error.strerror}") from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = read_pid(descriptor)
                os.close(descriptor)
                if time.monotonic() < until:
                    time.sleep(_RETRY_S)
                    continue
                raise UserError(
                    f"output {str(self.path.parent)!r} is in use by another run (process "
                    f"{holder}); wait until it ends, or choose another --out"
                ) from None
            except OSError as error:
                os.close(descriptor)
                raise UserError(
                    f"output {str(self.path.parent)!r} cannot be locked against other runs "
                    f"({error.strerror}); choose an --out on a disk that supports flock"
                ) from None
            if self._is_current(descriptor):
                return descriptor
            # Its owner removed the file after it was opened here and before it was locked.
            os.close(descriptor)

    def _is_current(self, descriptor: int) -> bool:
        """Whether the lock file still is the one that was opened."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._close.alive:
            with contextlib.suppress(OSError):  # a file that stays blocks no process
                self.path.unlink(missing_ok=True)
            self._close()


def read_pid(descriptor: int) -> str:
    """Return the process ID in an open lock file, or "unknown"."""
    with contextlib.suppress(OSError):
        return os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
    return "unknown"
