"""Runs handed to a cluster through submitit (extra `slurm`).

A job is a command that takes up its run folder where it stands. Cut off, preempted or sent
back to the queue, it is given to the cluster as it is, again. Which jobs nobody has collected
yet is in the sweep's folder (jobs.json): the same sweep finds them there.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gaugelasso.errors import UserError, first_line
from gaugelasso.runs.reading import exists, read_json
from gaugelasso.runs.writing import write_json
from gaugelasso.sweeps.worker import Worker, written_at

# Time for a run to save itself before its job leaves.
_GRACE_S = 30
_LOOK_S = 0.2
# Slurm takes a job away half a minute after it has told its processes to stop. If it does not,
# the run goes on.
_LEAVE_S = 60


class Command:
    """What a job does. On a signal of the cluster the run saves, and the job queues again."""

    def __init__(self, words: Sequence[str], folder: Path, log: Path):
        self.words, self.folder, self.log = list(words), folder, log
        self._worker: Worker | None = None

    def __call__(self) -> int:
        self._worker = Worker(self.words, self.folder, self.log, rest_s=_LEAVE_S)
        # Not wait(): it would keep a signal's handler from waiting.
        while (code := self._worker.poll()) is None:
            time.sleep(_LOOK_S)
        if self._worker.error:  # in no log: the job's own has it
            raise UserError(self._worker.error)
        return code

    def checkpoint(self) -> Any:
        """Called by submitit: the submission that takes this one's place."""
        from submitit.helpers import DelayedSubmission

        if (worker := self._worker) is not None:
            worker.stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(_GRACE_S)
            worker.kill()
        return DelayedSubmission(Command(self.words, self.folder, self.log))


@dataclass(frozen=True)
class Entry:
    """A job in the book: what it does, and how to know it again."""

    cluster: str
    job: str
    words: list[str]
    summary_before: int | None


class Submitted:
    """A job as a sweep looks at it: a process elsewhere, which goes on when the sweep ends."""

    def __init__(
        self, job: Any, entry: Entry, done: Callable[[], bool], on_end: Callable[[], None]
    ):
        self._job, self._done, self._on_end = job, done, on_end
        self.summary_before, self._name = entry.summary_before, f"job {entry.job}"
        self.returncode: int | None = None
        self.error = ""

    @property
    def aside(self) -> str:
        # Slurm does not know a job yet, is not to be asked just now, or has forgotten it: none of
        # these says that it has ended.
        return self._name + (", unknown to the cluster" if self._job.state == "UNKNOWN" else "")

    def poll(self) -> int | None:
        if self.returncode is None and self._done():
            if self._job.exception() is None:
                self.returncode = self._job.result()
            else:  # not the run's own failure, but the job's
                self.returncode, self.error = 1, f"see {self._job.paths.stderr}"
            self._on_end()
        return self.returncode


class Cluster:
    """Where jobs go: `name` is "slurm" or "local" (submitit's own), `settings` are submitit's.

    Its book is the sweep's folder's: jobs.json, and what submitit writes in jobs/.
    """

    def __init__(self, name: str, settings: Mapping[str, str], folder: Path):
        try:
            import submitit
        except ImportError:
            raise UserError(
                f"--cluster {name}: needs submitit; pip install 'gaugelasso[slurm]'"
            ) from None
        self.name, self._book = name, folder / "jobs.json"
        self._jobs = _read_book(self._book)
        try:
            self._executor = submitit.AutoExecutor(folder / "jobs", cluster=name)
            self._executor.update_parameters(**{key: _read(text) for key, text in settings.items()})
        except (RuntimeError, ValueError, TypeError, NameError, OSError) as error:
            raise UserError(f"--cluster {name}: {first_line(error)}") from None

    def has(self, folder: Path) -> bool:
        """Whether a run was submitted and not collected."""
        return self._key(folder) in self._jobs

    def check(self, words: Sequence[str], folder: Path) -> None:
        """UserError if a run's job is another than would be submitted."""
        entry = self._jobs.get(self._key(folder))
        if entry and (entry.cluster, entry.words) != (self.name, list(words)):
            raise UserError(
                f"{str(folder)!r} has a job already ({entry.job}, --cluster {entry.cluster}), with "
                f"other settings: give those, or cancel it and remove it from {str(self._book)!r}"
            )

    def start(self, words: Sequence[str], folder: Path, log: Path) -> Submitted:
        """The job of a run: the one it has already, or a new one."""
        self.check(words, folder)
        return self._found(folder) or self._submit(words, folder, log)

    def _submit(self, words: Sequence[str], folder: Path, log: Path) -> Submitted:
        before = written_at(folder / "summary.json")
        try:
            job = self._executor.submit(Command(words, folder, log))
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise UserError(f"the cluster took no job: {first_line(error)}") from None
        entry = Entry(self.name, job.job_id, list(words), before)
        self._write(self._jobs | {self._key(folder): entry})
        return Submitted(job, entry, job.done, lambda: self._forget(folder))

    def _found(self, folder: Path) -> Submitted | None:
        """The job that a run has; None if there is none, or it was lost without a word."""
        entry = self._jobs.get(self._key(folder))
        if entry is None:
            return None
        from submitit import LocalJob, SlurmJob

        at = self._executor.folder
        job: Any = (SlurmJob if self.name == "slurm" else LocalJob)(at, entry.job)
        # Of a process that it did not start itself, submitit would say that it is done.
        done = job.done if self.name == "slurm" else lambda: not _is_here(entry.job, at)
        if done() and not job.paths.result_pickle.exists():
            return None
        return Submitted(job, entry, done, lambda: self._forget(folder))

    def _key(self, folder: Path) -> str:
        return str(folder.relative_to(self._book.parent))

    def _forget(self, folder: Path) -> None:
        self._write({key: each for key, each in self._jobs.items() if key != self._key(folder)})

    def _write(self, jobs: dict[str, Entry]) -> None:
        self._jobs = jobs
        write_json(self._book, {key: asdict(each) for key, each in jobs.items()})


def _read_book(path: Path) -> dict[str, Entry]:
    if not exists(path):
        return {}
    try:
        jobs = {key: Entry(**each) for key, each in read_json(path).items()}
        if not all(isinstance(each.job, str) for each in jobs.values()):
            raise TypeError
    except (AttributeError, TypeError):
        raise UserError(f"{str(path)!r}: not a list of jobs; remove it if none runs") from None
    return jobs


def _is_here(job: str, folder: Path) -> bool:
    """Whether a job of submitit's own cluster, which is a process, is there."""
    try:
        words = Path("/proc", job, "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    # Its number may have passed on to another.
    return b"submitit.local._local" in words and os.fsencode(folder) in words


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
