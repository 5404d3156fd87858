"""A run as a process: it waits for its folder, and is started again when it is killed."""

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.files import lock
from gaugelasso.files.lock import FolderLock
from gaugelasso.sweeps import worker
from gaugelasso.sweeps.worker import TRIES, Worker, holder
from tests.command import until

ONCE = "[ -e died ] && exit 0; touch died"


class Script:
    """A shell script in the place of a run; it prints the option for an existing folder."""

    def __init__(self, folder: Path):
        self.home, self.folder, self.log = folder, folder / "run", folder / "run.log"
        self.folder.mkdir()

    def __call__(self, text: str, **how: Any) -> Worker:
        words = ["sh", "-c", f'cd "{self.home}"; echo "run $1"; {text}', "run"]
        return Worker(words, self.folder, self.log, **how)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def begun(self) -> list[str]:
        return [line for line in self.lines() if line.startswith("run ")]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def code(run: Worker) -> int | None:
    until(lambda: run.poll() is not None)
    return run.returncode


@pytest.mark.parametrize("existing", ["refuse", "overwrite", "resume"])
def test_a_killed_run_goes_on(script: Script, existing: Any) -> None:
    """Whatever option it started with, a restart resumes and does not replace its work."""
    (script.folder / "config.json").write_text("old")
    new = "rm run/config.json; echo new > run/config.json"
    restarts: list[str] = []
    run = script(f"{ONCE}; {new}; kill -9 $$", existing=existing, on_restart=restarts.append)
    assert code(run) == 0
    first = {"refuse": "run ", "overwrite": "run --overwrite", "resume": "run --resume"}[existing]
    assert script.lines() == [
        first,
        "killed by SIGKILL; starts again in 0 s",
        "run --resume",
    ]
    assert restarts == script.lines()[1:2]


def test_an_old_run_is_replaced_however_often_that_is_broken_off(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the old config.json exists, the old run is not resumed and its steps do not count."""
    (script.folder / "config.json").write_text("old")
    monkeypatch.setattr(
        worker, "_newest_step", lambda _: 100 if (script.folder / "old").exists() else 5
    )
    (script.folder / "old").touch()
    stages = "[ -e two ] && exit 0; [ -e one ] && touch two && rm run/*; touch one"
    run = script(f"{stages}; kill -9 $$", existing="overwrite")
    assert code(run) == 0
    assert script.begun() == ["run --overwrite", "run --overwrite", "run --resume"]
    assert len(script.lines()) == 5
    assert run._newest_step == 5


def test_a_run_that_always_dies_has_failed(script: Script) -> None:
    assert code(script("kill -9 $$")) == -9
    assert len(script.begun()) == TRIES + 1
    end = f"killed {TRIES + 1} times without a new checkpoint; not started again"
    assert script.lines()[-1] == end


def test_a_run_that_comes_further_may_die_more_often(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: Iterator[int] = iter([-1, -1, 10, 10, 10, 20, 20, 20, 20])
    monkeypatch.setattr(worker, "_newest_step", lambda _: next(steps))
    assert code(script("kill -9 $$")) == -9
    assert len(script.begun()) == 9
    assert next(steps, None) is None


@pytest.mark.parametrize("end", ["exit 143", "kill -15 $$"])
def test_a_stopped_run_stays_so_unless_told_otherwise(script: Script, end: str) -> None:
    assert code(script(f"{ONCE}; {end}")) in (143, -15)
    (script.home / "died").unlink()
    assert code(script(f"{ONCE}; {end}", restart_after_s=0)) == 0


def test_a_stopped_run_rests_before_it_goes_on(script: Script) -> None:
    run = script(f"{ONCE}; exit 143", restart_after_s=600)
    until(lambda: run.poll() is not None or "starts again in 600 s" in script.log.read_text())
    assert run.poll() is None
    assert len(script.begun()) == 1
    run.stop()
    run.wait()


def test_an_error_is_the_end(script: Script) -> None:
    assert code(script("exit 2")) == 2
    assert script.begun() == ["run --resume"]


def test_a_folder_in_use_is_waited_for(script: Script) -> None:
    other = FolderLock(script.folder)
    assert holder(script.folder) == str(os.getpid())
    run = script("exit 0")
    for _ in range(3):
        assert run.poll() is None
    assert run.status == f"waits for process {os.getpid()}, which uses its folder"
    assert script.lines() == [run.status]
    other.release()
    assert holder(script.folder) is None
    assert code(run) == 0
    assert run.status == ""


def test_a_look_at_a_lock_refuses_nobody(script: Script) -> None:
    """`holder` takes the lock for a moment, too."""
    with (script.folder / lock.NAME).open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        looked = threading.Timer(0.2, fcntl.flock, (looking, fcntl.LOCK_UN))
        looked.start()
        FolderLock(script.folder).release()
        looked.join()


def test_a_pipe_in_the_place_of_a_lock_is_no_lock(script: Script) -> None:
    os.mkfifo(script.folder / lock.NAME)
    holders: list[str | None] = []
    look = threading.Thread(target=lambda: holders.append(holder(script.folder)), daemon=True)
    look.start()
    look.join(timeout=10)
    assert holders == [None]


def test_a_run_refused_for_another_was_faster_waits(script: Script) -> None:
    run = script('until [ -e late ]; do sleep 0.05; done; [ "$(cat late)" = no ] || exit 2')
    other = FolderLock(script.folder)
    (script.home / "late").write_text("yes")
    until(lambda: run.poll() is not None or run.status)
    assert run.returncode is None
    (script.home / "late").write_text("no")
    other.release()
    assert code(run) == 0
    assert len(script.begun()) == 2


def test_a_folder_in_use_is_not_waited_for_to_be_replaced(script: Script) -> None:
    """The run starts and is refused by the lock."""
    other = FolderLock(script.folder)
    assert code(script("exit 2", existing="overwrite")) == 2
    other.release()


def test_an_older_summary_is_the_one_before_the_run(script: Script) -> None:
    """It is looked up when the run starts, after waiting for the folder."""
    other = FolderLock(script.folder)
    run = script("exit 0")
    (script.folder / "summary.json").write_text("{}")
    other.release()
    assert code(run) == 0
    assert run.summary_before == (script.folder / "summary.json").stat().st_mtime_ns


def test_logs_are_replaced_with_their_run_and_else_kept(script: Script) -> None:
    script.log.write_text("before\n")
    assert code(script("exit 0", existing="resume")) == 0
    assert script.lines() == ["before", "run --resume"]
    assert code(script("exit 0", existing="overwrite")) == 0
    assert script.lines() == ["run --overwrite"]


def test_a_log_that_cannot_be_written_is_the_runs_failure(script: Script) -> None:
    script.log.mkdir()
    run = script("exit 0")
    assert run.returncode == 2
    assert run.error == f"output {str(script.log)!r} cannot be written: Is a directory"


def test_a_full_disk_is_the_runs_failure(script: Script) -> None:
    """The disk is full when the worker notes in the log that the run was killed."""
    script.log = Path("/dev/full")
    run = script("kill -9 $$")
    assert code(run) == 2
    assert run.error == "output '/dev/full' cannot be written: No space left on device"


def test_what_cannot_be_started_has_failed(script: Script) -> None:
    run = Worker([str(script.home / "none")], script.folder, script.log)
    assert run.returncode == 2
    assert "none' cannot be run: No such file or directory" in run.error


def test_a_run_is_asked_to_stop(script: Script) -> None:
    run = script("trap 'exit 143' TERM; touch listening; while :; do sleep 0.05; done")
    until((script.home / "listening").exists)
    run.stop()
    run.wait()
    assert run._process
    assert run._process.returncode == 143
