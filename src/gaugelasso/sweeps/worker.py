"""A run as a process: started when its folder is free, and started again if it is killed.

Used by sweeps on this machine and by jobs of a cluster. The run saves its own checkpoints; this
module only sends it the signal to stop.
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

# How many times in a row a run is started again without a new checkpoint in between.
TRIES = 3
_OPTIONS: Mapping[Existing, list[str]] = {
    "refuse": [],
    "resume": ["--resume"],
    "overwrite": ["--overwrite"],
}
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
# A run that is told to stop exits with 128 + signal; before it has handlers, the signal kills it.
_STOPPED = {code for number in _STOP_SIGNALS for code in (128 + number, -number)}


def holder(folder: Path) -> str | None:
    """Return the process that holds the lock of a run folder; None if no process does."""
    try:
        file = untrusted.open_plain(folder / lock.NAME, links=False)
    except OSError:  # usually: no such file
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.read_pid(file.fileno())
        except OSError:  # a disk without locks; the run reports that itself
            return None
    return None


def open_log(path: Path, mode: str = "ab") -> IO[bytes]:
    """Open the file for the output of a run; UserError if it cannot be written."""
    try:
        return path.open(mode)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"output {str(path)!r} cannot be written: {error.strerror}")


def modified_ns(path: Path) -> int | None:
    """Return when a file was modified, in ns; None if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return None


class Worker:
    """One run. Call `poll`, which also starts the process, until there is a `returncode`.

    With `existing` = "resume", the run waits until no other process uses its folder. If the run is
    killed, it is started again. If it is stopped by a signal that this class did not send, it is
    started again after `restart_after_s` seconds, or not at all if that is None. Each restart is
    noted in the log and passed to `on_restart`. A run that cannot be started, or whose log cannot
    be written, has failed; `error` is the reason.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        log: Path,
        existing: Existing = "resume",
        environment: Mapping[str, str] | None = None,
        restart_after_s: float | None = None,
        on_restart: Callable[[str], None] = lambda text: None,
    ):
        self.words, self.folder, self.log = list(words), folder, log
        self.returncode: int | None = None
        # When an older summary was written, which is not an outcome of this process.
        self.summary_before: int | None = None
        # What progress lines add to the figures of the run.
        self.status = ""
        self.error = ""
        self._existing, self._environment = existing, environment
        self._restart_after_s, self._on_restart = restart_after_s, on_restart
        self._process: subprocess.Popen[bytes] | None = None
        self._config = folder / "config.json"
        self._replaced = modified_ns(self._config) if existing == "overwrite" else None
        # Keep the output of an earlier process, which may still be running.
        self._log_mode = "ab" if existing == "resume" else "wb"
        self._start_at = 0.0
        self._newest_step, self._tries_left = -1, TRIES
        self.poll()

    def poll(self) -> int | None:
        """Return the final exit code, as subprocess defines it; None until there is one."""
        try:
            if self._process is None:
                if self.returncode is None:
                    self._start()
            elif (code := self._process.poll()) is not None:
                self._process = None
                if not self._restarts(code):
                    self.returncode = code
        except UserError as error:
            self.returncode, self.error = error.exit_code, str(error)
        return self.returncode

    @property
    def old_run_remains(self) -> bool:
        """Whether the older run that this one replaces still exists."""
        # Its config.json is removed last.
        return self._replaced is not None and modified_ns(self._config) == self._replaced

    def stop(self) -> None:
        """Send the signal to save and exit. Do not poll afterwards."""
        if self._process is not None:
            self._process.terminate()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the process to exit; subprocess.TimeoutExpired after `timeout` seconds."""
        if self._process is not None:
            self._process.wait(timeout)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _start(self) -> None:
        if time.monotonic() < self._start_at:
            return
        if self._existing == "resume" and (pid := holder(self.folder)):
            if not self.status:
                self.status = f"waits for process {pid}, which uses its folder"
                self._note(self.status)
            return
        self.status = ""
        self.summary_before = modified_ns(self.folder / "summary.json")
        with open_log(self.log, self._log_mode) as log:
            self._process = self._open_process(log)
        self._log_mode = "ab"

    def _open_process(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [*self.words, *_OPTIONS[self._existing]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
        except OSError as error:
            raise UserError(f"{self.words[0]!r} cannot be run: {error.strerror}") from None

    def _restarts(self, code: int) -> bool:
        """Decide whether the run is started again after this exit code, and prepare that."""
        if code > 0 and self._existing == "resume" and holder(self.folder):
            return True  # refused, because another process locked the folder first
        stopped = code in _STOPPED
        if not (code < 0 or stopped) or (stopped and self._restart_after_s is None):
            return False
        # An old run that still exists must not be resumed, and its checkpoints are no progress.
        if not self.old_run_remains:
            self._existing = "resume"
            if (newest := _newest_step(self.folder)) > self._newest_step:
                self._newest_step, self._tries_left = newest, TRIES
        if not self._tries_left:
            self._note(f"killed {TRIES + 1} times without a new checkpoint; not started again")
            return False
        self._tries_left -= 1
        delay_s = self._restart_after_s if stopped and self._restart_after_s else 0
        self._start_at = time.monotonic() + delay_s
        message = f"{_cause(code)}; starts again in {delay_s:.0f} s"
        self._note(message)
        self._on_restart(message)
        return True

    def _note(self, text: str) -> None:
        try:
            with self.log.open("ab") as log:
                log.write(f"{text}\n".encode())
        except OSError as error:  # a full disk shows only when the file is closed
            raise _unwritable(self.log, error) from None


def _cause(code: int) -> str:
    """Describe how a run ended, from its exit code as subprocess defines it."""
    with contextlib.suppress(ValueError):  # not the number of a signal
        return f"killed by {signal.Signals(-code).name}"
    return f"stopped with exit code {code}"


def _newest_step(folder: Path) -> int:
    """Return the step of the newest intact checkpoint; -1 if there is none."""
    with contextlib.suppress(UserError):
        if found := checkpoint.find(folder):
            return found.step
    return -1
