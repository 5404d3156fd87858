"""Runs handed to a cluster through submitit (extra `slurm`).

A job is a command that takes up its run folder where it stands. Cut off, preempted or sent
back to the queue, it is given to the cluster as it is, again.
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError

# Time for a run to save itself before its job leaves.
_GRACE_S = 30
_LOOK_S = 0.2
# Slurm takes a job away half a minute after it has said so.
_LEAVE_S = 60
_STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGUSR2)


class Command:
    """What a job does. On a signal of the cluster the run saves, and the job queues again."""

    def __init__(self, words: Sequence[str], log: Path):
        self.words, self.log = list(words), log
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        # A stop that the cluster sent to the run itself: it is about to take the job away. If it
        # does not, the run goes on.
        while (code := self._run()) in _STOPPED:
            time.sleep(_LEAVE_S)
        return code

    def _run(self) -> int:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            # Not wait(): it would keep a signal's handler from waiting.
            while self._process.poll() is None:
                time.sleep(_LOOK_S)
            return self._process.returncode

    def checkpoint(self) -> Any:
        """Called by submitit: the submission that takes this one's place."""
        from submitit.helpers import DelayedSubmission

        if (process := self._process) is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            process.kill()
        return DelayedSubmission(Command(self.words, self.log))


class Submitted:
    """A job as a sweep looks at it: a process elsewhere."""

    def __init__(self, job: Any):
        self._job = job
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._job.done():
            failure = self._job.exception()
            self.returncode = self._job.result() if failure is None else 1
        return self.returncode

    def leave(self) -> None:
        """The sweep ends; the job goes on."""


class Cluster:
    """Where jobs go: `name` is "slurm" or "local" (submitit's own), `settings` are submitit's."""

    def __init__(self, name: str, settings: Mapping[str, str], folder: Path):
        try:
            import submitit
        except ImportError:
            raise UserError(
                f"--cluster {name}: needs submitit; pip install 'gaugelasso[slurm]'"
            ) from None
        try:
            self._executor = submitit.AutoExecutor(folder / "jobs", cluster=name)
            self._executor.update_parameters(**{key: _read(text) for key, text in settings.items()})
        except (RuntimeError, ValueError, TypeError, NameError) as error:
            raise UserError(f"--cluster {name}: {str(error).splitlines()[0]}") from None

    def start(self, words: Sequence[str], log: Path) -> Submitted:
        try:
            return Submitted(self._executor.submit(Command(words, log)))
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise UserError(f"the cluster took no job: {str(error).splitlines()[0]}") from None


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """'KEY=VALUE' each; UserError names what is wrong."""
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (equals and key and value):
            raise UserError(
                f"--cluster-set {text!r}: write it as KEY=VALUE, e.g. timeout_min=240 or "
                "slurm_partition=gpu"
            )
        settings[key] = value
    return settings


def _read(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
