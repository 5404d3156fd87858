"""Many seeds, of one condition or of several arms: one process a run.

All arms share one pool of processes, on this machine or on a cluster. A run that fails does
not stop the others. On a GPU the processes share it, through CUDA MPS where that can be started.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from gaugelasso.errors import UserError
from gaugelasso.runs.folder import Existing, RunFolder
from gaugelasso.runs.reading import last_row
from gaugelasso.runs.writing import make_folder
from gaugelasso.signals import Stopped, stop_requests
from gaugelasso.sweeps.arms import Arm, ArmOutcome
from gaugelasso.sweeps.cluster import Cluster, Submitted
from gaugelasso.sweeps.worker import Worker, open_log, written_at

# Seconds between looks at the runs, and between a run's progress lines.
_LOOK_S = 1.0
_REPORT_EVERY = 15.0


@dataclass(frozen=True)
class Plan:
    """What a sweep trains: every seed of every arm, at most `jobs` at a time.

    An arm's changes come after those of all. With `on_gpu`, on this machine's.
    """

    config: Path
    seeds: Sequence[int]
    arms: Sequence[Arm]
    jobs: int = 1
    changes: Sequence[str] = ()
    device: str | None = None
    existing: Existing = "refuse"
    on_gpu: bool = False

    def words(self, arm: Arm, seed: int) -> list[str]:
        """The command of one run, but for what is to become of an existing folder."""
        folder = arm.run_folder(seed)
        words = [sys.executable, "-m", "gaugelasso", "train", str(self.config)]
        words += ["--out", str(folder), *(["--device", self.device] if self.device else [])]
        changes = (f"train.seed={seed}", *self.changes, *arm.changes)
        return words + [part for change in changes for part in ("--set", change)]

    def prepare(self, cluster: Cluster | None) -> None:
        """Fail before any run starts: neither runs nor logs of an earlier sweep are touched."""
        runs = [(arm, seed) for arm in self.arms for seed in self.seeds]
        folders = [arm.run_folder(seed) for arm, seed in runs]
        if cluster:
            for (arm, seed), folder in zip(runs, folders, strict=True):
                cluster.check(self.words(arm, seed), folder)
        if self.existing == "refuse":
            for folder in folders:
                if not (cluster and cluster.has(folder)):
                    RunFolder.check_free(folder)
        for arm in self.arms:
            make_folder(arm.folder)
        for folder in folders:
            open_log(_log(folder)).close()


@dataclass
class _Job:
    outcome: ArmOutcome
    seed: int
    process: Worker | Submitted
    reported_at: float = 0.0

    @property
    def folder(self) -> Path:
        return self.outcome.arm.run_folder(self.seed)

    def __str__(self) -> str:
        return self.outcome.arm.say(self.seed)


def run_sweep(plan: Plan, console: Console, cluster: Cluster | None = None) -> list[ArmOutcome]:
    """Train all that is planned; one outcome an arm.

    All seeds of the first arm start first. Asked to stop, as runs are, it stops its runs and
    raises Stopped; jobs of a cluster go on.
    """
    plan.prepare(cluster)
    outcomes = [ArmOutcome(arm) for arm in plan.arms]
    waiting = [(outcome, seed) for outcome in outcomes for seed in plan.seeds]
    running: list[_Job] = []
    shared = _shared_gpu() if plan.on_gpu and plan.jobs > 1 else contextlib.nullcontext()
    try:
        with shared:
            _train(plan, waiting, running, console, cluster)
    except Stopped as stopped:
        if old := _not_replaced(plan, waiting, running):
            text = f"{stopped}, but first with --overwrite for what it has not come to: {old}"
            raise Stopped(text, stopped.exit_code) from None
        raise
    return outcomes


def _train(
    plan: Plan,
    waiting: list[tuple[ArmOutcome, int]],
    running: list[_Job],
    console: Console,
    cluster: Cluster | None,
) -> None:
    """Until nothing waits or runs any more. Stopped, the lists have what was not done."""
    rest = "while its jobs go on" if cluster else "with its runs saved"
    with stop_requests() as request:
        try:
            while waiting or running:
                while waiting and len(running) < plan.jobs:
                    running.append(_start(plan, *waiting.pop(0), console, cluster))
                # Nowhere else: a process that was just started must not be forgotten.
                with request.interruptible(f"{rest}; give the command again with --resume"):
                    time.sleep(_LOOK_S)
                for job in list(running):
                    # Asked by Ctrl-C, runs may be gone before the sweep has come to it.
                    if job.process.poll() is not None and not request.asked:
                        running.remove(job)
                        _end(job, console)
                _report(running, console)
        finally:
            _stop([job.process for job in running if isinstance(job.process, Worker)])


def _not_replaced(plan: Plan, waiting: list[tuple[ArmOutcome, int]], running: list[_Job]) -> str:
    """The runs that were to be replaced and still stand as they did."""
    if plan.existing != "overwrite":
        return ""
    old = [str(job) for job in running if isinstance(job.process, Worker) and job.process.to_come]
    old += [outcome.arm.say(s) for outcome, s in waiting if outcome.arm.run_folder(s).exists()]
    return "; ".join(old)


def _start(
    plan: Plan, outcome: ArmOutcome, seed: int, console: Console, cluster: Cluster | None
) -> _Job:
    folder, words = outcome.arm.run_folder(seed), plan.words(outcome.arm, seed)
    if cluster:
        return _Job(outcome, seed, cluster.start(words, folder, _log(folder)))
    threads = max(1, (os.cpu_count() or 1) // plan.jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}

    def tell(text: str) -> None:
        _say(console, f"{outcome.arm.say(seed)}: {text}; see {_log(folder)}")

    log, existing = _log(folder), plan.existing
    return _Job(outcome, seed, Worker(words, folder, log, existing, environment, tell=tell))


def _stop(workers: list[Worker]) -> None:
    """All are asked before the first is waited for: they take as long as the slowest."""
    for worker in workers:
        worker.stop()
    try:
        for worker in workers:
            worker.wait()
    except KeyboardInterrupt:  # a second Ctrl-C means now
        for worker in workers:
            worker.kill()
        raise


def _end(job: _Job, console: Console) -> None:
    """Close the books on a run whose process is gone."""
    code = job.process.returncode
    # A refused run leaves an older summary behind: not this sweep's.
    written = written_at(job.folder / "summary.json")
    if code == 0 or written not in (None, job.process.summary_before):
        job.outcome.ended.append(job.seed)
    if code == 0:
        _say(console, f"{job}: done, {_last(job.folder)}")
    else:
        job.outcome.failed.append(job.seed)
        why = job.process.error or f"see {_log(job.folder)}"
        _say(console, f"{job}: failed with code {code}, {why}")


def _log(folder: Path) -> Path:
    return folder.with_suffix(".log")


def _report(running: list[_Job], console: Console) -> None:
    for job in running:
        if time.monotonic() - job.reported_at >= _REPORT_EVERY:
            job.reported_at = time.monotonic()
            said = filter(None, (job.process.aside, _last(job.folder)))
            _say(console, f"{job}: {', '.join(said)}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _last(folder: Path) -> str:
    """Format the newest row of a run's metrics; a warning if it is damaged.

    The damage concerns this run only, so it must not stop the sweep.
    """
    path = folder / "metrics.jsonl"
    try:
        row = last_row(path)
        if row is None:
            return "starting"
        return f"step {row['step']}, loss {row['loss']:.4f}, FMA {row['fma']:,.0f}"
    except UserError as error:
        return f"warning: {error}"
    except (KeyError, TypeError, ValueError, OverflowError):  # not the columns of a metrics row
        return f"warning: {str(path)!r}: its last line is damaged, it has no loss or no FMA"


@contextlib.contextmanager
def _shared_gpu() -> Iterator[None]:
    """CUDA MPS for as long as the sweep runs, if this machine lets us start it."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield
        return
    started = subprocess.run([control, "-d"], capture_output=True).returncode == 0
    try:
        yield
    finally:
        if started:
            subprocess.run([control], input=b"quit\n", capture_output=True)
