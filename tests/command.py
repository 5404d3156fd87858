"""The command line, in this process or one of its own, and how it tells of an error."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gaugelasso import cli

Answer = tuple[int, str, str]
Command = Callable[..., Answer]


def calling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """The command: exit code, stdout, stderr. A traceback fails the test."""

    def call(*arguments: str | Path) -> Answer:
        monkeypatch.setattr(sys, "argv", ["gaugelasso", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        code = stopped.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), out, err

    # The entry point sets up its own process; here it is ours.
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    precision = torch.get_float32_matmul_precision()
    yield call
    torch.set_float32_matmul_precision(precision)


def for_real(*arguments: str | Path) -> Answer:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "gaugelasso", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def assert_told(answer: Answer, said: str) -> None:
    """Exit code 2 and one plain line."""
    code, _, err = answer
    assert code == 2
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1
    assert said in err


def until(come: Callable[[], object], most_s: float = 120) -> None:
    """Wait for a condition."""
    began = time.monotonic()
    while not come():
        assert time.monotonic() - began < most_s
        time.sleep(0.05)


def write_script(path: Path, text: str) -> str:
    """A shell script in the place of Python."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)
