"""Calls the command line, in this process or in a new one, and checks its errors."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gaugelasso import cli
from tests import warm

Answer = tuple[int, str, str]
Command = Callable[..., Answer]


def calling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Yields the command as a function: exit code, stdout, stderr. A traceback fails the test."""

    def call(*arguments: str | Path) -> Answer:
        monkeypatch.setattr(sys, "argv", ["gaugelasso", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        code = stopped.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), out, err

    # The entry point changes global settings; restore them afterwards.
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    precision = torch.get_float32_matmul_precision()
    yield call
    torch.set_float32_matmul_precision(precision)


# The command line with empty pictures in its reports, as in the fixture `undrawn`.
_UNDRAWN = """
import sys
from gaugelasso import cli
from gaugelasso.report import heatmap, profile, training
def draw(runs, path):
    path.write_bytes(b"")
heatmap.draw_saturation = profile.draw_profile = training.draw_training = draw
sys.argv[0] = "gaugelasso"
cli.main()
"""


def run_process(*arguments: str | Path, drawn: bool = True) -> Answer:
    """Run the command in a new process; to save time, without the pictures of reports."""
    program = ["-m", "gaugelasso"] if drawn else ["-c", _UNDRAWN]
    command = [warm.python(), *program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def assert_user_error(answer: Answer, message: str) -> None:
    """Exit code 2, and one line on stderr that contains the message."""
    code, _, err = answer
    assert code == 2
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1
    assert message in err


def until(condition: Callable[[], object], most_s: float = 120) -> None:
    """Wait for a condition; fail after `most_s` seconds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < most_s
        time.sleep(0.02)


def write_script(path: Path, text: str) -> str:
    """Write a shell script that replaces Python in a test."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)
