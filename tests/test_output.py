"""What commands say where nobody hears it: the work is done all the same."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import assert_told
from tests.test_config import write_tiny
from tests.training import assert_same_run, finish

COMMAND = [sys.executable, "-m", "gaugelasso"]


def shell(words: list[str], streams: str) -> int:
    """The exit code of a command with its streams as a shell would have them."""
    line = f"{shlex.join(words)} {streams}"
    return subprocess.run(["sh", "-c", line], timeout=120).returncode


def test_a_run_outlives_whoever_listens(tmp_path: Path) -> None:
    """A log on a full disk, a reader that is gone or never was: the run ends as it would have."""
    train = [*COMMAND, "train", str(write_tiny(tmp_path)), "--out"]
    runs = {name: tmp_path / name for name in ("full", "mute", "gone", "alone")}
    words = {name: [*train, str(path)] for name, path in runs.items()}
    told = subprocess.PIPE
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words["full"], stdout=full, stderr=told, text=True, timeout=120)
    assert_told((done.returncode, "", done.stderr), "standard output cannot be written (No space")
    assert shell(words["mute"], ">/dev/full 2>/dev/full") == 2
    with subprocess.Popen(words["gone"], stdout=told, stderr=told) as child:
        assert child.stdout
        assert child.stderr
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 0
    assert shell(words["alone"], ">&- 2>&-") == 0
    for name in ("mute", "gone", "alone"):
        assert_same_run(runs[name], runs["full"])


def test_errors_have_their_code_where_nobody_listens(tmp_path: Path) -> None:
    assert shell([*COMMAND, "info", str(tmp_path)], "2>&-") == 2


def test_a_terminal_that_knows_no_arrows_gets_none(tmp_path: Path) -> None:
    command = [*COMMAND, "info", str(finish(tmp_path))]
    said = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command, capture_output=True, env=said, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


@pytest.mark.parametrize("words", [["--help"], ["info", "--help"], []], ids=" ".join)
def test_help_on_a_full_disk_is_an_error_in_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert_told((done.returncode, "", done.stderr), "standard output cannot be written (No space")


def test_a_wrong_option_has_its_exit_code_where_errors_cannot_be_written() -> None:
    assert shell([*COMMAND, "info", "--wrong"], "2>/dev/full") == 2


def test_help_for_a_reader_that_is_gone_is_no_error() -> None:
    with subprocess.Popen([*COMMAND, "--help"], stdout=-1, stderr=-1) as child:
        assert child.stdout
        assert child.stderr
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 0
