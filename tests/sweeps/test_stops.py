"""Sweeps that are interrupted: their runs are saved and found again, and no process is lost."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from gaugelasso import signals
from gaugelasso.runs import checkpoint
from gaugelasso.runs.reading import read_rows
from gaugelasso.sweeps import sweep
from gaugelasso.sweeps.arms import Arm, parse_arms
from gaugelasso.sweeps.sweep import Plan
from gaugelasso.sweeps.worker import Worker, holder
from tests import warm
from tests.command import until, write_script
from tests.report.folders import make_run
from tests.tiny import write_tiny
from tests.tiny_runs import contents


class Endless:
    """A sweep in its own process; its runs never end and save only when they are stopped."""

    def __init__(self, folder: Path):
        self.out, self.log = folder / "out", folder / "log"
        self.runs = [self.out / "seed4", self.out / "seed5"]
        self.config = write_tiny(folder)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [warm.python(), "-m", "gaugelasso", "sweep", str(self.config)]
        command += ["--seeds", "4-5", "--jobs", "2", "--out", str(self.out), *words]
        for key in ("steps", "checkpoint_every"):
            command += ["--set", f"train.{key}=100000000"]
        command += ["--set", "target.loss=1e-9"]  # never held, so no checkpoint is saved for it
        with self.log.open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def text(self) -> str:
        return self.log.read_text()

    def at_work(self, after: Sequence[int] = (0, 0)) -> list[int]:
        """Return the processes of both runs, once each has a row after that step."""
        found = []
        for run, step in zip(self.runs, after, strict=True):
            if any(row["step"] > step for row in read_rows(run / "metrics.jsonl")):
                found += [int(pid) for pid in [holder(run)] if pid]
        return found if len(found) == 2 else []

    def saved(self) -> list[int]:
        found = [checkpoint.find(run) for run in self.runs]
        return [each.step for each in found if each]


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Endless]:
    made = Endless(tmp_path)
    yield made
    for run in made.runs:  # after a failed test
        if pid := holder(run):
            os.kill(int(pid), signal.SIGKILL)


def test_a_sweep_that_is_asked_to_stop_stops_its_runs(endless: Endless) -> None:
    first = endless.start()
    until(endless.at_work)
    first.terminate()
    assert first.wait(timeout=120) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM with its runs saved; run the command again" in endless.text()
    assert "Traceback" not in endless.text()
    assert [holder(run) for run in endless.runs] == [None, None]
    assert len(endless.saved()) == 2


def test_a_stopped_sweep_tells_which_old_runs_it_has_not_replaced(endless: Endless) -> None:
    make_run(endless.runs[1])
    before = contents(endless.runs[1])
    first = endless.start("--overwrite", "--jobs", "1", "--seeds", "4-6")
    until(lambda: (endless.runs[0] / "metrics.jsonl").exists())
    first.terminate()
    assert first.wait(timeout=120) == 128 + signal.SIGTERM
    # Seed 6 has no old run, so --resume starts it.
    assert "need --overwrite first: seed 5\n" in endless.text()
    assert contents(endless.runs[1]) == before


class Idle(Plan):
    """Its runs start, but never replace the old ones."""

    def words(self, arm: Arm, seed: int) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(600)"]


def test_a_run_that_has_begun_but_replaced_nothing_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (arm,) = parse_arms([], tmp_path)
    for seed in (4, 5):
        make_run(arm.run_folder(seed))
    before = contents(tmp_path / "seed4")
    monkeypatch.setattr(sweep, "_POLL_S", 0.05)
    monkeypatch.setattr(sweep, "_report", lambda *_: signal.raise_signal(signal.SIGTERM))
    plan = Idle(tmp_path / "any.toml", [4, 5, 6], [arm], existing="overwrite")
    with pytest.raises(signals.Stopped, match=r"need --overwrite first: seed 4; seed 5$"):
        sweep.run_sweep(plan, Console(file=io.StringIO()))
    assert contents(tmp_path / "seed4") == before


def test_runs_that_outlive_their_sweep_are_waited_for(endless: Endless) -> None:
    """They are not started twice; the runs and their logs continue where they ended."""
    first = endless.start()
    until(endless.at_work)
    first.kill()
    first.wait()
    orphans = endless.at_work()
    second = endless.start("--resume")
    until(lambda: all(f"waits for process {pid}, " in endless.text() for pid in orphans))
    assert endless.at_work() == orphans
    for pid in orphans:
        os.kill(pid, signal.SIGTERM)
    until(lambda: len(endless.saved()) == 2)
    until(lambda: endless.at_work(endless.saved()))
    second.terminate()
    assert second.wait(timeout=120) == 128 + signal.SIGTERM
    assert "failed" not in endless.text()
    for run in endless.runs:
        log = run.with_suffix(".log").read_text()
        assert "in use by another run" not in log
        assert log.count("stopped by SIGTERM after step ") == 2


@pytest.mark.usefixtures("hangup_heard")
@pytest.mark.parametrize("number", signals._NAMES)
def test_a_sweep_hears_what_runs_hear(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It exits with the code that a shell expects after this signal."""
    forever = "trap 'exit 143' TERM; touch $0.$$; while :; do sleep 0.05; done"
    monkeypatch.setattr(sys, "executable", write_script(tmp_path / "python", forever))
    workers: list[Worker] = []
    begin = Worker.__init__

    def note(worker: Worker, *arguments: Any, **named: Any) -> None:
        begin(worker, *arguments, **named)
        workers.append(worker)

    def ask(_: float) -> None:
        monkeypatch.undo()
        until(lambda: len(list(tmp_path.glob("python.*"))) == 2)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(Worker, "__init__", note)
    monkeypatch.setattr(sweep.time, "sleep", ask)
    plan = Plan(tmp_path / "c.toml", [1, 2, 3], parse_arms([], tmp_path), jobs=2)
    with pytest.raises(signals.Stopped) as stopped:
        sweep.run_sweep(plan, Console())
    assert stopped.value.exit_code == 128 + number
    assert [worker._process and worker._process.returncode for worker in workers] == [143, 143]


class Calls(list[str]):
    """Workers that record the calls of their methods."""

    def worker(self, name: str, impatient: bool = False) -> Any:
        def wait() -> None:
            self.append(f"wait {name}")
            if impatient:
                raise KeyboardInterrupt

        return SimpleNamespace(
            stop=lambda: self.append(f"stop {name}"),
            wait=wait,
            kill=lambda: self.append(f"kill {name}"),
        )


def test_all_runs_are_asked_before_one_is_waited_for() -> None:
    calls = Calls()
    sweep._stop([calls.worker("a"), calls.worker("b")])
    assert calls == ["stop a", "stop b", "wait a", "wait b"]


def test_a_second_interrupt_means_now() -> None:
    calls = Calls()
    with pytest.raises(KeyboardInterrupt):
        sweep._stop([calls.worker("a", impatient=True), calls.worker("b")])
    assert calls == ["stop a", "stop b", "wait a", "kill a", "kill b"]
