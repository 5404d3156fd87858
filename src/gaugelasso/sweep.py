"""Many seeds, of one condition or of several arms: one process a run.

All arms share one pool of processes, on this machine or on a cluster. A run that fails does
not stop the others. On a GPU the processes share it, through CUDA MPS where that can be started.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rich.console import Console

from gaugelasso.cluster import Cluster
from gaugelasso.errors import UserError
from gaugelasso.runs import make_folder, read_rows

# Seconds between a run's progress lines.
_REPORT_EVERY = 15.0
# A name is a folder, a row of a table and a line of a legend.
_LONGEST_NAME = 60


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
class Arm:
    """One condition: the settings that its runs change, and the folder they go to.

    A sweep that compares nothing is one arm without a name.
    """

    name: str
    changes: tuple[str, ...]
    folder: Path

    def run_folder(self, seed: int) -> Path:
        return self.folder / f"seed{seed}"

    def say(self, seed: int) -> str:
        return f"{self.name}, seed {seed}" if self.name else f"seed {seed}"


def parse_arms(texts: Sequence[str], out: Path) -> list[Arm]:
    """'NAME: KEY=VALUE KEY=VALUE', a folder under `out` each; UserError names what is wrong.

    Whether keys and values are right is for the config to say.
    """
    if not texts:
        return [Arm("", (), out)]
    arms: dict[str, Arm] = {}
    for text in texts:
        before, colon, after = text.partition(":")
        if not colon:
            raise UserError(
                f"--arm {text!r}: write it as 'NAME: KEY=VALUE ...', "
                "e.g. 'wide trust: compress.trust=4', or 'NAME:' for no change"
            )
        name, changes = " ".join(before.split()), tuple(after.split())
        folder = "-".join(re.findall(r"\w+", name.casefold()))
        if not folder:
            raise UserError(f"--arm {text!r}: give it a name of letters or digits before the colon")
        if len(name) > _LONGEST_NAME:
            raise UserError(
                f"--arm {text!r}: a name has at most {_LONGEST_NAME} characters, not {len(name)}"
            )
        for change in changes:
            if "=" not in change:
                raise UserError(f"--arm {text!r}: write {change!r} as key=value, no spaces in it")
            if change.startswith("train.seed="):
                raise UserError(f"--arm {text!r}: leave out {change}; seeds are given by --seeds")
        if (twin := arms.get(folder)) is not None:
            raise UserError(
                f"--arm {text!r}: the folder {folder!r} is taken by the arm {twin.name!r}; "
                "choose another name"
            )
        arms[folder] = Arm(name, changes, out / folder)
    return list(arms.values())


@dataclass(frozen=True)
class ArmOutcome:
    """Seeds of an arm: the runs that came to their end, and those that failed.

    A run that missed its target is in both: it failed, and its figures count.
    """

    arm: Arm
    ended: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    @property
    def folders(self) -> list[Path]:
        return [self.arm.run_folder(seed) for seed in sorted(self.ended)]


def said_failures(outcomes: Sequence[ArmOutcome], seeds: int) -> str:
    """Which runs failed and which arms have no figures at all, in one line; "" if none did."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    if not failed:
        return ""
    said = []
    for outcome in failed:
        numbers = f"seeds {', '.join(map(str, sorted(outcome.failed)))}"
        said.append(f"{outcome.arm.name}, {numbers}" if outcome.arm.name else numbers)
    runs = sum(len(outcome.failed) for outcome in failed)
    text = f"{runs} of {seeds * len(outcomes)} runs failed: {'; '.join(said)}"
    lost = [outcome.arm.name for outcome in failed if outcome.arm.name and not outcome.ended]
    return text + (f"; not in the results: {', '.join(lost)}" if lost else "")


class _Process(Protocol):
    """A run at work, here or elsewhere."""

    returncode: int | None

    def poll(self) -> int | None: ...

    def leave(self) -> None:
        """The sweep ends before the run does."""


class _Child(subprocess.Popen[bytes]):
    """A run on this machine; its words go to a log."""

    def __init__(self, words: list[str], log: Path, environment: dict[str, str]):
        with log.open("wb") as file:
            super().__init__(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def leave(self) -> None:
        self.terminate()
        self.wait()


@dataclass
class _Job:
    outcome: ArmOutcome
    seed: int
    process: _Process
    log: Path
    summary_before: int | None = None
    reported_at: float = 0.0

    @property
    def folder(self) -> Path:
        return self.outcome.arm.run_folder(self.seed)

    def __str__(self) -> str:
        return self.outcome.arm.say(self.seed)


def run_sweep(
    config: Path,
    seeds: Sequence[int],
    arms: Sequence[Arm],
    jobs: int,
    arguments: list[str],
    console: Console,
    on_gpu: bool,
    cluster: Cluster | None = None,
) -> list[ArmOutcome]:
    """Train every seed of every arm, at most `jobs` at a time; one outcome an arm.

    All seeds of the first arm start first. `arguments` go to every run; an arm's changes
    come after them. With a cluster runs go on when the sweep is broken off.
    """
    for arm in arms:
        make_folder(arm.folder)
    outcomes = [ArmOutcome(arm) for arm in arms]
    waiting = [(outcome, seed) for outcome in outcomes for seed in seeds]
    running: list[_Job] = []
    threads = max(1, (os.cpu_count() or 1) // jobs)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with _shared_gpu() if on_gpu and jobs > 1 else contextlib.nullcontext():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    job = _start(config, *waiting.pop(0), arguments, environment, cluster)
                    running.append(job)
                time.sleep(1.0)
                for job in list(running):
                    if job.process.poll() is not None:
                        running.remove(job)
                        _end(job, console)
                _report(running, console)
        finally:
            for job in running:
                job.process.leave()
    return outcomes


def _start(
    config: Path,
    outcome: ArmOutcome,
    seed: int,
    arguments: list[str],
    environment: dict[str, str],
    cluster: Cluster | None,
) -> _Job:
    arm = outcome.arm
    folder = arm.run_folder(seed)
    log, before = folder.with_suffix(".log"), _written_at(folder / "summary.json")
    words = [sys.executable, "-m", "gaugelasso", "train", str(config), "--out", str(folder)]
    words += ["--set", f"train.seed={seed}", *arguments]
    words += [part for change in arm.changes for part in ("--set", change)]
    process: _Process = cluster.start(words, log) if cluster else _Child(words, log, environment)
    return _Job(outcome, seed, process, log, before)


def _end(job: _Job, console: Console) -> None:
    """Close the books on a run whose process is gone."""
    code = job.process.returncode
    # A refused run leaves an older summary behind: not this sweep's.
    if code == 0 or _written_at(job.folder / "summary.json") not in (None, job.summary_before):
        job.outcome.ended.append(job.seed)
    if code == 0:
        _say(console, f"{job}: done, {_last(job.folder)}")
    else:
        job.outcome.failed.append(job.seed)
        _say(console, f"{job}: failed with code {code}, see {job.log}")


def _written_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _report(running: list[_Job], console: Console) -> None:
    for job in running:
        if time.monotonic() - job.reported_at >= _REPORT_EVERY:
            job.reported_at = time.monotonic()
            _say(console, f"{job}: {_last(job.folder)}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _last(folder: Path) -> str:
    try:
        rows = list(read_rows(folder / "metrics.jsonl"))
    except UserError as error:  # of one run: the others go on
        return str(error)
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
