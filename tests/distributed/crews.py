"""Runs of the tiny config on several ranks: real processes over gloo, without torchrun's start.

The store that ranks meet in is this process's, as under torchrun it is the launcher's.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch.distributed import TCPStore

from gaugelasso.training.trainer import Trainer
from tests import warm
from tests.tiny import TINY
from tests.warm.process import Process

_ROOT = Path(__file__).parents[2]
# Every step a row, so that every step's loss is compared. At a high rate some drops are spared,
# some go, and an operator is removed, all within a dozen steps.
STEPS = 16
SETTINGS = (
    "train.accumulate=4",
    "train.threads=1",
    "train.log_every=1",
    f"train.steps={STEPS}",
    "train.warmup=2",
    "train.cooldown=3",
    "train.checkpoint_every=4",
    "train.rank_timeout=10",
    "compress.lr=0.06",
    "compress.interval=3",
    "compress.trust=3",
    "compress.drop_tolerance=0.03",
)
CANONICAL = (*SETTINGS, "train.canonical=true")


@dataclass(frozen=True)
class Fault:
    """What befalls one rank before it takes its `step`-th step, or sums up after the last."""

    kind: Literal["kill", "hang", "perturb", "nan", "SIGTERM"]
    rank: int
    step: int

    @contextlib.contextmanager
    def befalling(self, rank: int) -> Iterator[None]:
        def struck(inner: Callable[..., Any]) -> Callable[..., Any]:
            def work(trainer: Trainer, *rest: Any) -> Any:
                if rank == self.rank and trainer.compressor.steps == self.step:
                    self._befall(trainer)
                return inner(trainer, *rest)

            return work

        with contextlib.ExitStack() as stack:
            # Nobody is slow to answer here.
            stack.enter_context(mock.patch("gaugelasso.distributed._ROLL_CALL_S", 1.0))
            for name in ("_step", "_final"):
                work = struck(getattr(Trainer, name))
                stack.enter_context(mock.patch.object(Trainer, name, work))
            yield

    def _befall(self, trainer: Trainer) -> None:
        if self.kind == "perturb":
            with torch.no_grad():
                weight = trainer.model.classifier.out
                weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
        elif self.kind == "nan":  # until the run goes back, and builds another step
            step = trainer.state.step
            losses = step.losses
            step.losses = lambda *batch: tuple(math.nan * each for each in losses(*batch))  # type: ignore[assignment,method-assign]
        else:
            names = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}
            os.kill(os.getpid(), names[self.kind])


def become(rank: int, size: int, port: int) -> None:
    """What torchrun tells a process of itself."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    torch.set_num_threads(1)


def _rank(
    rank: int, size: int, port: int, arguments: list[str], log: str, fault: Fault | None
) -> None:
    """In the child: what torchrun would run."""
    from gaugelasso import cli

    become(rank, size, port)
    os.fsync = lambda _: None  # tests need no durability
    descriptor = os.open(f"{log}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["gaugelasso", *arguments]
    with fault.befalling(rank) if fault else contextlib.nullcontext():
        cli.main()


@dataclass
class Crew:
    """One run's processes, begun together."""

    processes: list[Process]
    store: TCPStore = field(repr=False)

    @classmethod
    def of(cls, size: int, work: Callable[..., None], *arguments: Any) -> "Crew":
        """Start `work(rank, size, port, *arguments)` for every rank."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        every = ((rank, size, store.port, *arguments) for rank in range(size))
        return cls([Process(work, *each) for each in every], store)

    def wait(self) -> list[int]:
        """The exit codes once all have left; a rank that hangs is ended when the others have."""
        while any(process.is_alive() for process in self.processes):
            time.sleep(0.01)
            left = [process for process in self.processes if process.is_alive()]
            if len(left) == 1 and _stopped(left[0]):
                left[0].kill()
        codes = []
        for process in self.processes:
            process.join()
            assert process.exitcode is not None
            codes.append(process.exitcode)
        return codes


def _stopped(process: Process) -> bool:
    # It may leave before the file is opened, or between the opening and the reading.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


@dataclass
class Crews:
    """Runs under one folder."""

    home: Path
    settings: tuple[str, ...] = CANONICAL
    config: str = TINY

    def arguments(self, name: str, *options: str) -> list[str]:
        config = self.home / "tiny.toml"
        config.write_text(self.config)
        arguments = ["train", str(config), "--out", str(self.home / name), *options]
        return arguments + [part for setting in self.settings for part in ("--set", setting)]

    def start(self, name: str, size: int, *options: str, fault: Fault | None = None) -> Crew:
        """Begin a run on so many ranks, or with --resume go on with one."""
        return Crew.of(size, _rank, self.arguments(name, *options), str(self.home / name), fault)

    def run(self, name: str, size: int, *options: str, fault: Fault | None = None) -> list[int]:
        """Start, and wait for the end: the exit code of each rank."""
        return self.start(name, size, *options, fault=fault).wait()

    def log(self, name: str, rank: int = 0) -> str:
        return (self.home / f"{name}.{rank}.log").read_text()

    def logs(self, name: str) -> str:
        return "".join(path.read_text() for path in sorted(self.home.glob(f"{name}.*.log")))

    def finish(self, name: str, size: int, *options: str) -> Path:
        """A run that comes to its end; its folder."""
        assert self.run(name, size, *options) == [0] * size, self.logs(name)
        return self.home / name

    def torchrun(
        self, name: str, size: int, faults: list[Fault]
    ) -> subprocess.CompletedProcess[str]:
        """The run as a shell would start it, with a fault each time that it is started."""
        command = [warm.python(), "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={size}", f"--max-restarts={len(faults)}"]
        command += [
            "-m",
            "tests.distributed.dying",
            json.dumps([astuple(fault) for fault in faults]),
        ]
        command += self.arguments(name, "--resume")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False
        )
