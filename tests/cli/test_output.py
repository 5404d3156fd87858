"""Commands whose output cannot be written: the work is done all the same."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from tests import warm
from tests.command import assert_user_error
from tests.tiny import QUICK, settings, write_tiny
from tests.tiny_runs import assert_same_run, finished


def command(*words: str | Path) -> list[str]:
    return [warm.python(), "-m", "gaugelasso", *map(str, words)]


def shell(words: list[str], redirections: str) -> int:
    """The exit code of a command run by a shell with these redirections."""
    line = f"{shlex.join(words)} {redirections}"
    return subprocess.run(["sh", "-c", line], timeout=120).returncode


def test_a_run_finishes_without_its_output(tmp_path: Path) -> None:
    """With a full disk, a closed pipe or closed streams, the run is the same."""
    config = write_tiny(tmp_path)
    runs = {name: tmp_path / name for name in ("full", "both_full", "pipe", "closed")}
    quick = [word for item in settings(**QUICK).items() for word in ("--set", "=".join(item))]
    commands = {
        name: command("train", config, *quick, "--out", path) for name, path in runs.items()
    }
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(commands["full"], stdout=full, stderr=PIPE, text=True, timeout=120)
    assert_user_error(
        (done.returncode, "", done.stderr), "standard output cannot be written (No space"
    )
    assert shell(commands["both_full"], ">/dev/full 2>/dev/full") == 2
    with subprocess.Popen(commands["pipe"], stdout=PIPE, stderr=PIPE) as child:
        assert child.stdout
        assert child.stderr
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 0
    assert shell(commands["closed"], ">&- 2>&-") == 0
    for name in ("both_full", "pipe", "closed"):
        assert_same_run(runs[name], runs["full"])


def test_an_error_has_its_exit_code_with_stderr_closed(tmp_path: Path) -> None:
    assert shell(command("info", tmp_path), "2>&-") == 2


def test_output_is_ascii_if_the_encoding_is(tmp_path: Path) -> None:
    # Python's own choice of an encoding, so its own start.
    words = [sys.executable, "-m", "gaugelasso", "info", str(finished(tmp_path))]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(words, capture_output=True, env=environment, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


@pytest.mark.parametrize("words", [["--help"], ["info", "--help"], []], ids=" ".join)
def test_help_on_a_full_disk_is_an_error_in_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(*words), stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert_user_error(
        (done.returncode, "", done.stderr), "standard output cannot be written (No space"
    )


def test_a_wrong_option_has_its_exit_code_where_errors_cannot_be_written() -> None:
    assert shell(command("info", "--wrong"), "2>/dev/full") == 2


def test_help_for_a_reader_that_is_gone_is_no_error() -> None:
    with subprocess.Popen(command("--help"), stdout=-1, stderr=-1) as child:
        assert child.stdout
        assert child.stderr
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 0
