"""Runs as jobs of a cluster, submitted through submitit (extra `slurm`).

A job is a command that resumes its run folder. If the job times out, is preempted or is requeued,
the same command is submitted again. The file jobs.json in the sweep's folder lists the jobs whose
result was not collected yet, so that the same sweep finds them again.
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
from gaugelasso.sweeps.worker import Worker, modified_ns

# Time for a run to save a checkpoint before its job ends.
_GRACE_S = 30
_POLL_S = 0.2
# Slurm kills a job half a minute after it has sent the signal to stop. If the job is still there
# after this time, the run is started again.
_RESTART_AFTER_S = 60


class Command:
    """What a job runs. On a signal of the cluster, the run saves and the job is queued again."""

    def __init__(self, words: Sequence[str], folder: Path, log: Path):
        self.words, self.folder, self.log = list(words), folder, log
        self._worker: Worker | None = None

    def __call__(self) -> int:
        self._worker = Worker(self.words, self.folder, self.log, restart_after_s=_RESTART_AFTER_S)
        # Not wait(): it holds a lock that the signal handler needs to wait, too.
        while (code := self._worker.poll()) is None:
            time.sleep(_POLL_S)
        if self._worker.error:  # not in the log of the run, so it goes to the log of the job
            raise UserError(self._worker.error)
        return code

    def checkpoint(self) -> Any:
        """Called by submitit when the job must end; returns the job to submit in its place."""
        from submitit.helpers import DelayedSubmission

        if (worker := self._worker) is not None:
            worker.stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(_GRACE_S)
            worker.kill()
        return DelayedSubmission(Command(self.words, self.folder, self.log))


@dataclass(frozen=True)
class Entry:
    """A job in jobs.json: what it runs, and how to find it again."""

    cluster: str
    job: str
    words: list[str]
    summary_before: int | None


class Submitted:
    """A job that a sweep polls: a process elsewhere, which continues when the sweep ends."""

    def __init__(
        self, job: Any, entry: Entry, done: Callable[[], bool], on_end: Callable[[], None]
    ):
        self._job, self._done, self._on_end = job, done, on_end
        self.summary_before, self._name = entry.summary_before, f"job {entry.job}"
        self.returncode: int | None = None
        self.error = ""

    @property
    def status(self) -> str:
        """What progress lines add to the figures of the run."""
        # Unknown does not mean ended: Slurm may not list the job yet, may not answer now, or may
        # have removed it from its records.
        return self._name + (", unknown to the cluster" if self._job.state == "UNKNOWN" else "")

    def poll(self) -> int | None:
        if self.returncode is None and self._done():
            if self._job.exception() is None:
                self.returncode = self._job.result()
            else:  # the job failed, not the run
                self.returncode, self.error = 1, f"see {self._job.paths.stderr}"
            self._on_end()
        return self.returncode


class Cluster:
    """Submits jobs: `name` is "slurm" or "local" (submitit's own), `settings` are submitit's.

    Writes to the sweep's folder: jobs.json, and submitit's files in jobs/.
    """

    def __init__(self, name: str, settings: Mapping[str, str], folder: Path):
        try:
            import submitit
        except ImportError:
            raise UserError(
                f"--cluster {name}: needs submitit; pip install 'gaugelasso[slurm]'"
            ) from None
        self.name, self._jobs_file = name, folder / "jobs.json"
        self._jobs = _read_jobs(self._jobs_file)
        try:
            self._executor = submitit.AutoExecutor(folder / "jobs", cluster=name)
            self._executor.update_parameters(
                **{key: _parse_value(text) for key, text in settings.items()}
            )
        except (RuntimeError, ValueError, TypeError, NameError, OSError) as error:
            raise UserError(f"--cluster {name}: {first_line(error)}") from None

    def has(self, folder: Path) -> bool:
        """Whether a run has a job whose result was not collected."""
        return self._key(folder) in self._jobs

    def check(self, words: Sequence[str], folder: Path) -> None:
        """UserError if a run has a job with another command or cluster."""
        entry = self._jobs.get(self._key(folder))
        if entry and (entry.cluster, entry.words) != (self.name, list(words)):
            raise UserError(
                f"{str(folder)!r} already has a job ({entry.job}, --cluster {entry.cluster}) with "
                "other settings; use those settings, or cancel the job and remove it from "
                f"{str(self._jobs_file)!r}"
            )

    def start(self, words: Sequence[str], folder: Path, log: Path) -> Submitted:
        """Return the job of a run: the one it already has, or a new one."""
        self.check(words, folder)
        return self._find(folder) or self._submit(words, folder, log)

    def _submit(self, words: Sequence[str], folder: Path, log: Path) -> Submitted:
        before = modified_ns(folder / "summary.json")
        try:
            job = self._executor.submit(Command(words, folder, log))
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise UserError(f"the cluster did not accept the job: {first_line(error)}") from None
        entry = Entry(self.name, job.job_id, list(words), before)
        self._write(self._jobs | {self._key(folder): entry})
        return Submitted(job, entry, job.done, lambda: self._forget(folder))

    def _find(self, folder: Path) -> Submitted | None:
        """Return the job that a run has; None if it has none, or if the job left no result."""
        entry = self._jobs.get(self._key(folder))
        if entry is None:
            return None
        from submitit import LocalJob, SlurmJob

        home = self._executor.folder
        job: Any = (SlurmJob if self.name == "slurm" else LocalJob)(home, entry.job)
        # For a process that it did not start itself, submitit always reports that it is done.
        done = job.done if self.name == "slurm" else lambda: not _is_running(entry.job, home)
        if done() and not job.paths.result_pickle.exists():
            return None
        return Submitted(job, entry, done, lambda: self._forget(folder))

    def _key(self, folder: Path) -> str:
        return str(folder.relative_to(self._jobs_file.parent))

    def _forget(self, folder: Path) -> None:
        self._write({key: each for key, each in self._jobs.items() if key != self._key(folder)})

    def _write(self, jobs: dict[str, Entry]) -> None:
        self._jobs = jobs
        write_json(self._jobs_file, {key: asdict(each) for key, each in jobs.items()})


def _read_jobs(path: Path) -> dict[str, Entry]:
    if not exists(path):
        return {}
    try:
        jobs = {key: Entry(**each) for key, each in read_json(path).items()}
        if not all(isinstance(each.job, str) for each in jobs.values()):
            raise TypeError
    except (AttributeError, TypeError):
        raise UserError(
            f"{str(path)!r}: not a list of jobs; remove the file if no job is running"
        ) from None
    return jobs


def _is_running(job: str, folder: Path) -> bool:
    """Whether a job of submitit's own cluster, which is a local process, is running."""
    try:
        words = Path("/proc", job, "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    # Another process may have the same number by now.
    return b"submitit.local._local" in words and os.fsencode(folder) in words


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """Parse 'KEY=VALUE' texts; UserError names what is wrong."""
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


def _parse_value(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
