"""One thread: the tensors are tiny, and the machine is shared. And no waiting for its disk."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.command import Command, calling

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _quick_disk() -> Iterator[None]:
    """Should the power go, tests are run again; processes of their own flush all the same."""
    with mock.patch.object(os, "fsync", return_value=None):
        yield


@pytest.fixture
def gaugelasso(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    yield from calling(monkeypatch, capsys)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAUGELASSO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hangup_heard() -> Iterator[None]:
    """Tests that were started with nohup would else wait for what is ignored."""
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
