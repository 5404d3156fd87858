"""The command line in processes that can be killed; they start fast."""

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.tiny import TINY
from tests.tiny_runs import assert_same_run, newest, read
from tests.trust.traps import Bytes, Lines, Trap
from tests.warm.process import Process

# A row for every step, so that every loss is compared; a checkpoint every few steps.
SETTINGS = ("train.log_every=1", "train.checkpoint_every=3")


def _train(arguments: list[str], log: str, trap: Trap | None) -> None:
    """In the child process: run the command with a trap installed."""
    import torch

    from gaugelasso import cli

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    os.fsync = lambda _: None  # a kill loses nothing that was written, only a crash of the machine
    sys.argv = ["gaugelasso", *arguments]
    with trap or contextlib.nullcontext():
        try:
            cli.main()
        finally:
            if isinstance(trap, Lines | Bytes):
                Path(log).with_suffix(".seen").write_text(str(trap.seen))


@dataclass
class Runs:
    """Runs of the tiny config under one folder."""

    home: Path
    settings: tuple[str, ...] = SETTINGS

    def start(self, name: str, *options: str, trap: Trap | None = None) -> Process:
        """Start a run, or with --resume continue one."""
        config = self.home / "tiny.toml"
        config.write_text(TINY)
        arguments = ["train", str(config), "--out", str(self.home / name), *options]
        arguments += [part for setting in self.settings for part in ("--set", setting)]
        log = str(self.home / f"{name}.log")
        return Process(_train, arguments, log, trap)

    def run(self, name: str, *options: str, trap: Trap | None = None) -> int:
        """Start and wait for the end; return the exit code, negative for a signal."""
        process = self.start(name, *options, trap=trap)
        process.join()
        assert process.exitcode is not None
        return process.exitcode

    def killed(self, name: str, after: float, *options: str) -> bool:
        """Start, and SIGKILL after this many seconds; return False if the run ended before."""
        process = self.start(name, *options)
        process.join(after)
        process.kill()
        process.join()
        return process.exitcode == -9

    def count(self, name: str, trap: Lines | Bytes) -> int:
        """Return how many lines or bytes a trap sees in a complete run when it never triggers."""
        assert self.run(name, trap=trap) == 0, self.log(name)
        return int((self.home / f"{name}.seen").read_text())

    def seconds(self, name: str) -> float:
        """Return the duration of a complete run."""
        began = time.perf_counter()
        assert self.run(name) == 0
        return time.perf_counter() - began

    def log(self, name: str) -> str:
        return (self.home / f"{name}.log").read_text()


def assert_resumes(runs: Runs, reference: str, name: str) -> None:
    """The run that died resumes and becomes bit-identical to the one that did not die."""
    assert runs.run(name, "--resume") == 0, runs.log(name)
    assert_same_run(runs.home / reference, runs.home / name)


def assert_intact(reference: Path, run: Path) -> int:
    """The newest checkpoint equals the one of an undisturbed run; returns its step."""
    path = newest(run)
    other = reference / "checkpoints" / path.name
    for part in path.iterdir():
        if part.suffix == ".safetensors" or part.name == "structure.json":
            assert part.read_bytes() == (other / part.name).read_bytes(), part
    state, others = (read(folder / "state.json") for folder in (path, other))
    # Rows contain measured times, so the digests of the logs differ.
    of_its_own = {"wall_s": 0, "logs": {}}
    assert state | of_its_own == others | of_its_own
    return int(state["steps"])
