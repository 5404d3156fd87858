"""CUDA MPS is started and ended by the command that needs it, and by no other."""

import contextlib
import subprocess
from pathlib import Path

import pytest

from gaugelasso.sweeps.mps import shared_gpu


def control(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> Path:
    """A program in place of the control of MPS: it notes its arguments and input."""
    log = folder / "log"
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -d ]; then echo started >>{log}; exit {code}; fi\ncat >>{log}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return log


def test_it_runs_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = control(tmp_path, monkeypatch, 0)
    with contextlib.suppress(KeyError), shared_gpu():
        assert log.read_text() == "started\n"
        raise KeyError
    assert log.read_text() == "started\nquit\n"


def test_one_that_runs_already_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = control(tmp_path, monkeypatch, 1)
    with shared_gpu():
        pass
    assert log.read_text() == "started\n"


def test_nothing_is_started_where_it_is_not_wanted_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = control(tmp_path, monkeypatch, 0)
    with shared_gpu(False):
        pass
    assert not log.exists()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing to start"))
    with shared_gpu():
        pass
