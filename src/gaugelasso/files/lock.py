"""One process to a folder.

The lock is the kernel's (flock): it goes when its process does, however that ends, so a
file left behind by a dead process blocks nobody.
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
# Who only looks at a lock has it for a moment: nobody is refused for that.
_PATIENCE_S, _LOOK_S = 1.0, 0.05


class FolderLock:
    """Held from construction to `release`, or to the end of the process."""

    def __init__(self, folder: Path):
        self.path = folder / NAME
        descriptor = self._acquire()
        self._close = weakref.finalize(self, os.close, descriptor)
        with contextlib.suppress(OSError):  # for words alone: a full disk still locks
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())

    def _acquire(self) -> int:
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                descriptor = os.open(self.path, _FLAGS, 0o666)
            except OSError as error:
                where = str(self.path.parent)
                raise UserError(f"output {where!r} cannot be written: {error.strerror}") from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = named(descriptor)
                os.close(descriptor)
                if time.monotonic() < until:
                    time.sleep(_LOOK_S)
                    continue
                raise UserError(
                    f"output {str(self.path.parent)!r} is in use by another run (process "
                    f"{holder}); wait until it ends, or choose another --out"
                ) from None
            except OSError as error:
                os.close(descriptor)
                raise UserError(
                    f"output {str(self.path.parent)!r} cannot be locked against other runs "
                    f"({error.strerror}); choose an --out on a disk that knows flock"
                ) from None
            if self._is(descriptor):
                return descriptor
            # Its owner took the file away between our opening and our locking it.
            os.close(descriptor)

    def _is(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._close.alive:
            with contextlib.suppress(OSError):  # left behind, it blocks nobody
                self.path.unlink(missing_ok=True)
            self._close()


def named(descriptor: int) -> str:
    """The process that a lock's file names."""
    with contextlib.suppress(OSError):
        return os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
    return "unknown"
