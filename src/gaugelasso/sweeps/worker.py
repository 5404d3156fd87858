"""A run at work: a process, begun once the run's folder is free and again when it is killed.

Sweeps on this machine and jobs of a cluster keep their runs going alike. Saving is the run's own
business: here it is only asked to.
"""

import contextlib
import fcntl
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from gaugelasso.errors import UserError
from gaugelasso.files import lock, untrusted
from gaugelasso.runs import checkpoint
from gaugelasso.runs.folder import Existing

# How many times in a row a run is taken up again without a new checkpoint in between.
TRIES = 3
_WORDS: Mapping[Existing, list[str]] = {
    "refuse": [],
    "resume": ["--resume"],
    "overwrite": ["--overwrite"],
}
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
# Asked to stop, runs exit as a shell would say it; before they can listen they just die of it.
_STOPPED = {code for number in _ASKED for code in (128 + number, -number)}


def holder(folder: Path) -> str | None:
    """Which process a run folder is in use by, as its lock says; None if by none."""
    try:
        file = untrusted.open_plain(folder / lock.NAME, links=False)
    except OSError:  # mostly: no such file
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.named(file.fileno())
        except OSError:  # no locks on this disk: for the run to say
            return None
    return None


def open_log(path: Path, mode: str = "ab") -> IO[bytes]:
    """The file for what runs say; UserError if it cannot be written."""
    try:
        return path.open(mode)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"output {str(path)!r} cannot be written: {error.strerror}")


def written_at(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return None


class Worker:
    """Look at it with `poll`, which also begins what is to begin, until there is a `returncode`.

    A folder that another process has is waited for if the run is to go on there. A run that was
    asked to stop by somebody else goes on after `rest_s` seconds, or not at all. One that cannot
    be started, or whose log cannot be written, has failed: `error` says why. That a run was killed
    and goes on is noted in its log, and told to `tell`.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        log: Path,
        existing: Existing = "resume",
        environment: Mapping[str, str] | None = None,
        rest_s: float | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ):
        self.words, self.folder, self.log = list(words), folder, log
        self.returncode: int | None = None
        # When the summary was written that is there already, and so is not this run's.
        self.summary_before: int | None = None
        # What to say of it beside its figures.
        self.aside = ""
        self.error = ""
        self._existing, self._environment, self._rest_s = existing, environment, rest_s
        self._tell = tell
        self._process: subprocess.Popen[bytes] | None = None
        self._config = folder / "config.json"
        self._replaced = written_at(self._config) if existing == "overwrite" else None
        # What an earlier process said, or one that is still at it, is not to be lost.
        self._log_mode = "ab" if existing == "resume" else "wb"
        self._begin_at = 0.0
        self._reached, self._left = -1, TRIES
        self.poll()

    def poll(self) -> int | None:
        """The exit code, once there will be no other; as subprocess has it."""
        try:
            if self._process is None:
                if self.returncode is None:
                    self._begin()
            elif (code := self._process.poll()) is not None:
                self._process = None
                if not self._goes_on(code):
                    self.returncode = code
        except UserError as error:
            self.returncode, self.error = error.exit_code, str(error)
        return self.returncode

    @property
    def to_come(self) -> bool:
        """Whether an older run, which is to be replaced, is still there."""
        # Its config goes last.
        return self._replaced is not None and written_at(self._config) == self._replaced

    def stop(self) -> None:
        """Ask the run to save and end; not to be polled any more."""
        if self._process is not None:
            self._process.terminate()

    def wait(self, timeout: float | None = None) -> None:
        """Until the process has ended, or subprocess.TimeoutExpired."""
        if self._process is not None:
            self._process.wait(timeout)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _begin(self) -> None:
        if time.monotonic() < self._begin_at:
            return
        if self._existing == "resume" and (who := holder(self.folder)):
            if not self.aside:
                self.aside = f"waits for process {who}, which is at work in its folder"
                self._note(self.aside)
            return
        self.aside = ""
        self.summary_before = written_at(self.folder / "summary.json")
        with open_log(self.log, self._log_mode) as log:
            self._process = self._started(log)
        self._log_mode = "ab"

    def _started(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [*self.words, *_WORDS[self._existing]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
        except OSError as error:
            raise UserError(f"{self.words[0]!r} cannot be run: {error.strerror}") from None

    def _goes_on(self, code: int) -> bool:
        if code > 0 and self._existing == "resume" and holder(self.folder):
            return True  # refused, for another was faster
        stopped = code in _STOPPED
        if not (code < 0 or stopped) or (stopped and self._rest_s is None):
            return False
        # The old run is not gone on with, nor are its checkpoints new.
        if not self.to_come:
            self._existing = "resume"
            if (reached := _newest(self.folder)) > self._reached:
                self._reached, self._left = reached, TRIES
        if not self._left:
            self._note(f"killed {TRIES + 1} times without a new checkpoint: given up")
            return False
        self._left -= 1
        rest_s = self._rest_s if stopped and self._rest_s else 0
        self._begin_at = time.monotonic() + rest_s
        said = f"{_cause(code)}, not by itself; goes on in {rest_s:.0f} s"
        self._note(said)
        self._tell(said)
        return True

    def _note(self, text: str) -> None:
        try:
            with self.log.open("ab") as log:
                log.write(f"{text}\n".encode())
        except OSError as error:  # on a full disk, not before it is closed
            raise _unwritable(self.log, error) from None


def _cause(code: int) -> str:
    """How a run ended, by the exit code as subprocess has it."""
    with contextlib.suppress(ValueError):  # a number that has no name
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _newest(folder: Path) -> int:
    """The step of the newest whole checkpoint; -1 if there is none."""
    with contextlib.suppress(UserError):
        if found := checkpoint.find(folder):
            return found.step
    return -1
