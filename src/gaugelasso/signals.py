"""SIGTERM, Ctrl-C, a closed terminal and Slurm's SIGUSR2 as a request to stop.

A run stops at a point where no work is lost.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_NAMES = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "Ctrl-C",
    signal.SIGUSR2: "SIGUSR2",
    signal.SIGHUP: "a closed terminal",
}


class Stopped(BaseException):
    """A run stopped on request. `exit_code` is what a shell expects after the signal.

    A BaseException, because it may be raised anywhere and no handler of errors should catch it.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class StopRequest:
    """The signals received so far. `asked` may become true at any time."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._at_once: str | None = None
        self._cleaning = False

    @property
    def asked(self) -> bool:
        return self._signal is not None

    def stopped(self, rest: str) -> Stopped:
        """The exception to raise: its message names the signal and ends with `rest`."""
        if self._signal is None:
            return Stopped(f"stopped by a signal to another rank {rest}", 128 + signal.SIGTERM)
        name = _NAMES[signal.Signals(self._signal)]
        return Stopped(f"stopped by {name} {rest}", 128 + self._signal)

    @contextlib.contextmanager
    def interruptible(self, rest: str) -> Iterator[None]:
        """Within the context, a request raises Stopped at once, also one received before."""
        self._at_once = rest
        try:
            if self.asked:
                raise self.stopped(rest)
            yield
        finally:
            self._at_once = None

    @contextlib.contextmanager
    def cleaning(self) -> Iterator[None]:
        """Within the context nothing is interrupted: a second Ctrl-C does not stop at once."""
        self._cleaning = True
        try:
            yield
        finally:
            self._cleaning = False

    def handle(self, number: int, _: FrameType | None) -> None:
        """The signal handler."""
        if self.asked and number == signal.SIGINT and not self._cleaning:
            raise KeyboardInterrupt  # a second Ctrl-C stops at once
        # The message names the first signal: after Ctrl-C a sweep also sends SIGTERM.
        self._signal = self._signal or number
        if self._at_once is not None:
            raise self.stopped(self._at_once)


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Receive signals within the context. Only the main thread can; others never get a request."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    # A run started with nohup ignores a closed terminal.
    handled = [n for n in _NAMES if (n, signal.getsignal(n)) != (signal.SIGHUP, signal.SIG_IGN)]
    before = {number: signal.signal(number, request.handle) for number in handled}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
