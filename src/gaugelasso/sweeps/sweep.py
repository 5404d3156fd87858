"""Trains many seeds of one condition or of several arms, each run in its own process.

All arms share one pool of processes, on this machine or on a cluster. A run that fails does not
stop the others. Processes on one GPU share it through CUDA MPS, if MPS can be started.
"""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from gaugelasso.errors import UserError
from gaugelasso.runs.folder import Existing, RunFolder
from gaugelasso.runs.reading import last_row, read_json
from gaugelasso.runs.units import noun, number
from gaugelasso.runs.writing import make_folder
from gaugelasso.signals import Stopped, stop_requests
from gaugelasso.sweeps.arms import Arm, ArmOutcome
from gaugelasso.sweeps.cluster import Cluster, Submitted
from gaugelasso.sweeps.mps import shared_gpu
from gaugelasso.sweeps.worker import Worker, modified_ns, open_log

# Seconds between polls of the runs, and between the progress lines of a run.
_POLL_S = 1.0
_REPORT_S = 15.0


@dataclass(frozen=True)
class Plan:
    """What a sweep trains: every seed of every arm, at most `jobs` runs at a time.

    The changes of an arm are applied after `changes`. `on_gpu`: the runs use this machine's GPU.
    """

    config: Path
    seeds: Sequence[int]
    arms: Sequence[Arm]
    jobs: int = 1
    changes: Sequence[str] = ()
    device: str | None = None
    existing: Existing = "refuse"
    on_gpu: bool = False
    # What the user does after an interruption.
    to_go_on: str = "run the command again with --resume"

    def words(self, arm: Arm, seed: int) -> list[str]:
        """Return the command of one run, without the option for an existing folder."""
        folder = arm.run_folder(seed)
        words = [sys.executable, "-m", "gaugelasso", "train", str(self.config)]
        words += ["--out", str(folder), *(["--device", self.device] if self.device else [])]
        words += arm.options
        changes = (f"train.seed={seed}", *self.changes, *arm.changes)
        return words + [part for change in changes for part in ("--set", change)]

    def prepare(self, cluster: Cluster | None) -> None:
        """Fail before any run starts, so that no run or log of an earlier sweep is changed."""
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
    reported: str = ""

    @property
    def folder(self) -> Path:
        return self.outcome.arm.run_folder(self.seed)

    def __str__(self) -> str:
        return self.outcome.arm.label(self.seed)


def run_sweep(plan: Plan, console: Console, cluster: Cluster | None = None) -> list[ArmOutcome]:
    """Train all runs of the plan and return one outcome per arm.

    All seeds of the first arm start first. On a signal to stop, it stops its runs and raises
    Stopped; jobs of a cluster continue.
    """
    plan.prepare(cluster)
    outcomes = [ArmOutcome(arm) for arm in plan.arms]
    waiting = [(outcome, seed) for outcome in outcomes for seed in plan.seeds]
    running: list[_Job] = []
    try:
        with shared_gpu(plan.on_gpu and plan.jobs > 1):
            _train(plan, waiting, running, console, cluster)
    except Stopped as stopped:
        if old := _not_replaced(plan, waiting, running):
            text = f"{stopped}. Old runs that were not replaced yet need --overwrite first: {old}"
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
    """Train until both lists are empty. After Stopped, they hold the runs that are not finished."""
    state = "while its jobs continue" if cluster else "with its runs saved"
    with stop_requests() as request:
        try:
            while waiting or running:
                while waiting and len(running) < plan.jobs:
                    running.append(_start(plan, *waiting.pop(0), console, cluster))
                # Interrupted only here, where every process that was started is in the list.
                with request.interruptible(f"{state}; {plan.to_go_on}"):
                    time.sleep(_POLL_S)
                for job in list(running):
                    # Ctrl-C also reaches the runs, which may exit before this loop handles it.
                    if job.process.poll() is not None and not request.asked:
                        running.remove(job)
                        _record_end(job, console)
                _report(running, console)
        finally:
            _stop([job.process for job in running if isinstance(job.process, Worker)])


def _not_replaced(plan: Plan, waiting: list[tuple[ArmOutcome, int]], running: list[_Job]) -> str:
    """Name the old runs that should be replaced and still exist unchanged."""
    if plan.existing != "overwrite":
        return ""
    workers = [(str(job), job.process) for job in running if isinstance(job.process, Worker)]
    old = [label for label, worker in workers if worker.old_run_remains]
    old += [outcome.arm.label(s) for outcome, s in waiting if outcome.arm.run_folder(s).exists()]
    return "; ".join(old)


def _start(
    plan: Plan, outcome: ArmOutcome, seed: int, console: Console, cluster: Cluster | None
) -> _Job:
    folder, words = outcome.arm.run_folder(seed), plan.words(outcome.arm, seed)
    if cluster:
        return _Job(outcome, seed, cluster.start(words, folder, _log(folder)))
    threads = max(1, (os.cpu_count() or 1) // plan.jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}

    def report(text: str) -> None:
        _print(console, f"{outcome.arm.label(seed)}: {text}; see {_log(folder)}")

    log, existing = _log(folder), plan.existing
    return _Job(outcome, seed, Worker(words, folder, log, existing, environment, on_restart=report))


def _stop(workers: list[Worker]) -> None:
    """Stop all before waiting for the first, so that they save at the same time."""
    for worker in workers:
        worker.stop()
    try:
        for worker in workers:
            worker.wait()
    except KeyboardInterrupt:  # a second Ctrl-C does not wait
        for worker in workers:
            worker.kill()
        raise


def _record_end(job: _Job, console: Console) -> None:
    """Add a run whose process has exited to the outcome of its arm."""
    code = job.process.returncode
    # A run that was refused leaves an older summary, which is not a result of this sweep.
    written = modified_ns(job.folder / "summary.json")
    if code == 0 or written not in (None, job.process.summary_before):
        job.outcome.ended.append(job.seed)
    if code == 0:
        _print(console, f"{job}: done, {_last(job.folder)}")
    else:
        job.outcome.failed.append(job.seed)
        reason = job.process.error or f"see {_log(job.folder)}"
        _print(console, f"{job}: failed with code {code}, {reason}")


def _log(folder: Path) -> Path:
    return folder.with_suffix(".log")


def _report(running: list[_Job], console: Console) -> None:
    for job in running:
        if time.monotonic() - job.reported_at >= _REPORT_S:
            job.reported_at = time.monotonic()
            text = ", ".join(filter(None, (job.process.status, _last(job.folder))))
            if text != job.reported:  # the first row of a slow run may take minutes
                _print(console, f"{job}: {text}")
            job.reported = text


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _accounting(folder: Path) -> str:
    with contextlib.suppress(UserError, KeyError, TypeError):
        return str(read_json(folder / "config.json")["compress"]["accounting"])
    return "fma"


def _last(folder: Path) -> str:
    """Format the newest row of a run's metrics; a warning if it is damaged.

    The damage concerns this run only, so it must not stop the sweep.
    """
    path = folder / "metrics.jsonl"
    try:
        row = last_row(path)
        if row is None:
            return "starting"
        counted = _accounting(folder)
        cost = f"{noun(counted)} {number(row['fma'], counted)}"
        return f"step {row['step']}, loss {row['loss']:.4f}, {cost}"
    except UserError as error:
        return f"warning: {error}"
    except (KeyError, TypeError, ValueError, OverflowError):  # not the columns of a metrics row
        return f"warning: {str(path)!r}: its last line is damaged, it has no loss or no FMA"
