"""Disks that are full, failing or read-only: an error of one line, and nothing is lost.

A few offsets here; `make torture` tries more, in separate processes.
"""

import errno
import fcntl
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from gaugelasso.errors import UserError
from gaugelasso.files.lock import NAME as LOCK
from gaugelasso.runs.folder import RunFolder
from gaugelasso.signals import Stopped
from tests.tiny import QUICK
from tests.tiny_runs import assert_same_run, contents, finish, newest, read, start, stop_at
from tests.trust.children import assert_intact
from tests.trust.traps import Bytes, Flushes, ReadOnly, Signals, Trap

OFTEN: dict[str, Any] = {**QUICK, "train__log_every": 1, "train__checkpoint_every": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run with all its checkpoints."""
    return finish(tmp_path_factory.mktemp("whole"), train__checkpoint_keep=99, **OFTEN)


@pytest.fixture(scope="module")
def size(whole: Path) -> int:
    """The number of bytes that such a run writes."""
    with Bytes() as disk:
        finish(whole.parent, "counted", **OFTEN)
    return disk.seen


def assert_survives(whole: Path, folder: Path, trap: Trap, message: str) -> None:
    """The run ends with one line, its newest checkpoint is intact, and it can be resumed."""
    with trap, pytest.raises(UserError, match=message) as error:
        start(folder, **OFTEN).run()
    assert "\n" not in str(error.value)
    assert str(folder / "run") in str(error.value)
    assert assert_intact(whole, folder / "run") > 0
    start(folder, existing="resume", **OFTEN).run()
    assert_same_run(whole, folder / "run")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.97])
def test_a_full_disk(whole: Path, size: int, tmp_path: Path, share: float) -> None:
    assert_survives(whole, tmp_path, Bytes(int(share * size)), "No space left")


def test_a_failing_disk(whole: Path, size: int, tmp_path: Path) -> None:
    assert_survives(whole, tmp_path, Bytes(size // 2, errno.EIO), "Input/output error")


@pytest.mark.parametrize("at", [45, 50, 54])
def test_a_disk_that_cannot_be_flushed(whole: Path, tmp_path: Path, at: int) -> None:
    """The flush of a log, of a file of a checkpoint, or of its folder fails."""
    assert_survives(whole, tmp_path, Flushes(at), "Input/output error")


def test_a_disk_that_may_no_longer_be_written(whole: Path, tmp_path: Path) -> None:
    assert_survives(whole, tmp_path, ReadOnly(at=10), "Read-only file system")


def test_a_limit_of_the_kernel(whole: Path, tmp_path: Path) -> None:
    """With a limit on the file size, the kernel refuses the file of the weights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    stop_at(start(tmp_path, **OFTEN), 8)
    kept = contents(newest(tmp_path / "run"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))
    try:
        with pytest.raises(UserError, match="File too large"):
            start(tmp_path, existing="resume", **OFTEN).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert contents(newest(tmp_path / "run")) == kept
    start(tmp_path, existing="resume", **OFTEN).run()
    assert_same_run(whole, tmp_path / "run")


# --- two runs, one folder ------------------------------------------------------------------


@pytest.mark.parametrize("existing", ["refuse", "resume", "overwrite"])
def test_a_second_run_is_refused(whole: Path, tmp_path: Path, existing: Any) -> None:
    first = start(tmp_path, **OFTEN)
    before = contents(tmp_path / "run")
    message = "already exists" if existing == "refuse" else f"in use by another run .*{os.getpid()}"
    with pytest.raises(UserError, match=message):
        start(tmp_path, existing=existing, **OFTEN)
    assert contents(tmp_path / "run") == before
    first.run()
    assert_same_run(whole, tmp_path / "run")
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_dead_process_blocks_nobody(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).write_text("1\n")
    start(tmp_path, **OFTEN).run()
    assert_same_run(whole, tmp_path / "run")


def test_a_disk_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=r"cannot be locked .*\(No locks available\); choose"):
        RunFolder.open(tmp_path / "run")


def test_a_lock_is_not_followed_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "thesis.txt")
    with pytest.raises(UserError, match="cannot be written"):
        RunFolder.open(tmp_path / "run")
    assert (tmp_path / "thesis.txt").read_text() == "irreplaceable"


# --- asked to stop -------------------------------------------------------------------------


@pytest.mark.usefixtures("hangup_heard")
@pytest.mark.parametrize(
    ("number", "name", "code"),
    [
        (signal.SIGTERM, "SIGTERM", 143),
        (signal.SIGINT, "Ctrl-C", 130),
        (signal.SIGHUP, "a closed terminal", 129),
    ],
)
def test_a_stop_saves(whole: Path, tmp_path: Path, number: int, name: str, code: int) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with Signals(10, number), pytest.raises(Stopped) as error:
        start(tmp_path, **OFTEN).run()
    assert error.value.exit_code == code
    for part in (f"stopped by {name} after step 11", "--resume", str(tmp_path / "run")):
        assert part in str(error.value)
    assert read(newest(tmp_path / "run") / "state.json")["steps"] == 11
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    start(tmp_path, existing="resume", **OFTEN).run()
    assert_same_run(whole, tmp_path / "run")


def test_a_stop_in_the_last_evaluation_does_not_wait(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(tmp_path, **OFTEN)
    monkeypatch.setattr(trainer, "_summary", lambda _: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped, match="after step 18"):
        trainer.run()
    start(tmp_path, existing="resume", **OFTEN).run()
    assert_same_run(whole, tmp_path / "run")


def test_with_nohup_a_run_outlives_its_terminal(whole: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(10, signal.SIGHUP):
            start(tmp_path, **OFTEN).run()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert_same_run(whole, tmp_path / "run")


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    with Signals(10, signal.SIGINT), Signals(10, signal.SIGINT), pytest.raises(KeyboardInterrupt):
        start(tmp_path, **OFTEN).run()
    assert read(newest(tmp_path / "run") / "state.json")["steps"] == 9
