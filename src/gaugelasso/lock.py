"""One process to a folder.

The lock is the kernel's (flock): it goes when its process does, however that ends, so a
file left behind by a dead process blocks nobody.
"""

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from gaugelasso.errors import UserError

NAME = "run.lock"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK


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
        while True:
            try:
                descriptor = os.open(self.path, _FLAGS, 0o666)
            except OSError as error:
                where = str(self.path.parent)
                raise UserError(f"output {where!r} cannot be written: {error.strerror}") from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 20).decode(errors="replace").strip()
                os.close(descriptor)
                raise UserError(
                    f"output {str(self.path.parent)!r} is in use by another run (process "
                    f"{holder or 'unknown'}); wait until it ends, or choose another --out"
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
