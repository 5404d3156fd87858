"""Fixtures for all tests.

Imports neither torch nor the package: the process that hands out tests to workers needs neither,
and no worker starts before it.
"""

import compileall
import contextlib
import functools
import gc
import importlib
import logging
import os
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from tests import warm

if TYPE_CHECKING:
    from tests.command import Command


def pytest_collection(session: pytest.Session) -> None:
    """Each of several workers compiles its share of all files first, and finds the rest compiled.

    Else, without a cache, all of them would compile all files, one after the other. No garbage is
    collected meanwhile: what is imported stays, and syntax trees would be searched in vain.
    """
    worker, count = (os.environ.get(f"PYTEST_XDIST_WORKER{end}") for end in ("", "_COUNT"))
    if worker is None or session.config.args != session.config.getini("testpaths"):
        return
    gc.disable()
    number, of = int(worker.removeprefix("gw")), int(count or 1)
    root = session.config.rootpath
    for path in sorted((root / "src").rglob("*.py"))[number::of]:
        compileall.compile_file(path, quiet=2)
    tests = sorted((root / "tests").rglob("test_*.py"))
    first = number * len(tests) // of
    for path in tests[first:] + tests[:first]:
        # An import compiles. Collection imports again, and reports what is wrong.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """One thread, because the tensors are tiny.

    Garbage collections skip what lives as long as the tests: modules and test items; and they are
    rare, as tests are short. Torch's loggers hand on their records: to each that does not, pytest
    adds a handler six times per test.
    """
    import torch

    torch.set_num_threads(1)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch")]:
        logging.getLogger(name).propagate = True
    _freeze()
    gc.set_threshold(200_000, 20, 100)
    gc.enable()


def pytest_runtest_setup() -> None:
    """Small products without oneDNN on an ARM CPU, whatever the test before has set.

    Training does so by itself (`training.evaluation.configure_cpu_`): a product of 64 x 32 x 32 and
    its backward take half the time.
    """
    import torch

    if platform.machine().lower() in ("aarch64", "arm64"):
        torch.backends.mkldnn.set_flags(False, _fp32_precision=None)


def pytest_runtest_teardown() -> None:
    """Modules that a test was the first to import live as long as the tests, too.

    A run that goes back or resumes collects garbage, in which it would look through all of them.
    """
    if len(sys.modules) > _frozen + 50:
        _freeze()


_frozen = 0  # modules at the last freeze


def _freeze() -> None:
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = len(sys.modules)


@pytest.fixture(autouse=True, scope="session")
def _no_fsync() -> Iterator[None]:
    """Tests need no durability. Processes that start anew still flush to the disk."""
    with mock.patch.object(os, "fsync", return_value=None):
        yield


@pytest.fixture(autouse=True, scope="session")
def _known_commit() -> Iterator[None]:
    """Else every run would ask Git for the commit of the source."""
    with mock.patch.dict(os.environ, GAUGELASSO_COMMIT="c0ffee"):
        yield


@pytest.fixture(autouse=True, scope="session")
def _small_products() -> Iterator[None]:
    """A benchmark multiplies small matrices, too, to see how fast the machine is."""
    with mock.patch("gaugelasso.bench.stopwatch._SIZES", {"cuda": 64, "cpu": 64}):
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_parser() -> Iterator[None]:
    """The parser of all commands is built once, not in each call: it takes longer than most."""
    import typer.main

    with mock.patch.object(typer.main, "get_command", functools.cache(typer.main.get_command)):
        yield


@pytest.fixture
def gaugelasso(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> "Iterator[Command]":
    from tests.command import calling

    yield from calling(monkeypatch, capsys)


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that code under test starts with `sys.executable` start fast."""
    monkeypatch.setattr(sys, "executable", warm.python())


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports with empty pictures, to save time: tests/report/test_pictures.py draws them."""
    for name, content in (("profile", b"1"), ("saturation", b"3"), ("training", b"2")):
        module = "heatmap" if name == "saturation" else name
        monkeypatch.setattr(
            f"gaugelasso.report.{module}.draw_{name}",
            lambda runs, path, content=content: path.write_bytes(content),
        )


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAUGELASSO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hangup_heard() -> Iterator[None]:
    """Under nohup SIGHUP is ignored, and tests that send it would wait forever."""
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
