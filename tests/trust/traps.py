"""Failures at an exact place of a run: SIGKILL, a full disk, a failing disk.

A run writes all its files with `os.write`, so failures of the disk are simulated there.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal
from unittest import mock

from gaugelasso.compress.compressor import Compressor
from gaugelasso.runs import checkpoint
from gaugelasso.training.trainer import Trainer

Where = Literal["event", "save"]
_REAL_WRITE, _REAL_FSYNC = os.write, os.fsync


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Lines:
    """SIGKILL before the `at`-th line of Python that runs inside events, or inside saves."""

    where: Where
    at: float = float("inf")
    seen: int = 0

    def _trace(self, frame: FrameType, what: str, _: Any) -> Any:
        if what == "line":
            self.seen += 1
            if self.seen >= self.at:
                _die()
        return self._trace

    def __enter__(self) -> "Lines":
        owner, name = (Compressor, "event_") if self.where == "event" else (checkpoint, "save")
        inner: Callable[..., Any] = getattr(owner, name)

        def traced(*args: Any, **kwargs: Any) -> Any:
            sys.settrace(self._trace)
            try:
                return inner(*args, **kwargs)
            finally:
                sys.settrace(None)

        self._patch = mock.patch.object(owner, name, traced)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


@dataclass
class Bytes:
    """After `at` bytes of a run's files the disk is full, fails, or the power goes off.

    `error` is the error number of the disk; None means power off. The last write is partial.
    """

    at: float = float("inf")
    error: int | None = errno.ENOSPC
    seen: int = 0

    def _write(self, descriptor: int, data: Any) -> int:
        room = self.at - self.seen
        if room >= len(data):
            self.seen += len(data)
            return _REAL_WRITE(descriptor, data)
        if room > 0:
            self.seen += _REAL_WRITE(descriptor, data[: int(room)])
        if self.error is None:
            _die()
        elif room > 0:
            return int(room)
        raise OSError(self.error or errno.EIO, os.strerror(self.error or errno.EIO))

    def __enter__(self) -> "Bytes":
        self._patch = mock.patch.object(os, "write", self._write)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


@dataclass
class Flushes:
    """The `at`-th flush to the disk and all after it fail."""

    at: int
    seen: int = 0

    def _fsync(self, descriptor: int) -> None:
        self.seen += 1
        if self.seen >= self.at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        _REAL_FSYNC(descriptor)

    def __enter__(self) -> "Flushes":
        self._patch = mock.patch.object(os, "fsync", self._fsync)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


@dataclass
class ReadOnly:
    """From step `at` on, no file can be opened for writing, made, renamed or removed."""

    at: int

    def __enter__(self) -> "ReadOnly":
        self._stack = ExitStack()
        take, opened = Trainer._step, os.open

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR):
                refuse()
            return opened(path, flags, *rest, **more)

        def step(trainer: Trainer) -> Any:
            if trainer.compressor.steps == self.at:
                for name in ("mkdir", "replace", "unlink", "rmdir"):
                    self._stack.enter_context(mock.patch.object(os, name, refuse))
                self._stack.enter_context(mock.patch.object(os, "open", read_only))
            return take(trainer)

        self._stack.enter_context(mock.patch.object(Trainer, "_step", step))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@dataclass
class Signals:
    """The process receives this signal in the middle of step `at`."""

    at: int
    number: int = signal.SIGTERM

    def __enter__(self) -> "Signals":
        finish = Compressor.finish_step_

        def finish_step(compressor: Compressor) -> Any:
            if compressor.steps == self.at:
                signal.raise_signal(self.number)
            return finish(compressor)

        self._patch = mock.patch.object(Compressor, "finish_step_", finish_step)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


Trap = Lines | Bytes | Flushes | ReadOnly | Signals
