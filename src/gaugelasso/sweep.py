"""Many seeds side by side: one process a run, on one machine.

A run that fails does not stop the others. On a GPU the processes share it, through
CUDA MPS where that can be started.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console

from gaugelasso.errors import UserError
from gaugelasso.runs import read_rows

# Seconds between a run's progress lines.
_REPORT_EVERY = 15.0


def parse_seeds(text: str) -> list[int]:
    """'42-46', '1,5,9' or a mix; UserError names what is wrong."""
    seeds: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        try:
            first, last = int(low), int(high) if dash else int(low)
        except ValueError:
            raise UserError(f"--seeds {text!r}: give numbers as in 42-46 or 1,5,9") from None
        if last < first:
            raise UserError(f"--seeds {text!r}: {part!r} runs backwards")
        seeds += [seed for seed in range(first, last + 1) if seed not in seeds]
    return seeds


@dataclass(frozen=True)
class SweepOutcome:
    """Folders of the runs that came to their end, and the seeds that failed.

    A run that missed its target is in both: it failed, and its figures count.
    """

    ended: list[Path]
    failed: list[int]


@dataclass
class _Job:
    seed: int
    folder: Path
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    had_summary: bool = False
    reported_at: float = 0.0


def run_sweep(
    config: Path,
    seeds: list[int],
    out: Path,
    jobs: int,
    arguments: list[str],
    console: Console,
    on_gpu: bool,
) -> SweepOutcome:
    """Train every seed, at most `jobs` at a time."""
    out.mkdir(parents=True, exist_ok=True)
    waiting, running, failed = list(seeds), list[_Job](), list[int]()
    ended: list[Path] = []
    threads = max(1, (os.cpu_count() or 1) // jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with _shared_gpu() if on_gpu and jobs > 1 else contextlib.nullcontext():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_start(config, waiting.pop(0), out, arguments, environment))
                time.sleep(1.0)
                for job in list(running):
                    code = job.process.poll()
                    if code is None:
                        continue
                    running.remove(job)
                    job.log.close()
                    # A refused run leaves an older summary behind: not this sweep's.
                    summary = job.folder / "summary.json"
                    if code == 0 or (summary.exists() and not job.had_summary):
                        ended.append(job.folder)
                    if code == 0:
                        _say(console, f"seed {job.seed}: done, {_last(job.folder)}")
                    else:
                        failed.append(job.seed)
                        log = job.log.name
                        _say(console, f"seed {job.seed}: failed with code {code}, see {log}")
                _report(running, console)
        finally:
            for job in running:
                job.process.terminate()
                job.process.wait()
                job.log.close()
    return SweepOutcome(sorted(ended), sorted(failed))


def _start(
    config: Path, seed: int, out: Path, arguments: list[str], environment: dict[str, str]
) -> _Job:
    folder = out / f"seed{seed}"
    had_summary = (folder / "summary.json").exists()
    log = (out / f"seed{seed}.log").open("wb")
    command = [sys.executable, "-m", "gaugelasso", "train", str(config), "--out", str(folder)]
    command += ["--set", f"train.seed={seed}", *arguments]
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
    )
    return _Job(seed, folder, process, log, had_summary)


def _report(running: list[_Job], console: Console) -> None:
    for job in running:
        if time.monotonic() - job.reported_at >= _REPORT_EVERY:
            job.reported_at = time.monotonic()
            _say(console, f"seed {job.seed}: {_last(job.folder)}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _last(folder: Path) -> str:
    rows = list(read_rows(folder / "metrics.jsonl"))
    if not rows:
        return "starting"
    row = rows[-1]
    return f"step {row['step']}, loss {row['loss']:.4f}, FMA {row['fma']:,.0f}"


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
