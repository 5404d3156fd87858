"""SIGTERM, Ctrl-C, a closed terminal and Slurm's SIGUSR2 as a request to stop.

Granted where nothing is lost by it.
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
    """A run that was asked to stop and did. Exits as a shell expects of such a process.

    May be raised anywhere, so it is no Exception: nobody on the way is to take it for a fault.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class StopRequest:
    """What was asked for so far. `asked` may turn true at any time."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._at_once: str | None = None

    @property
    def asked(self) -> bool:
        return self._signal is not None

    def stopped(self, rest: str) -> Stopped:
        """The error that says which signal it was, and `rest`."""
        if self._signal is None:
            return Stopped(f"stopped, as another rank was asked to, {rest}", 128 + signal.SIGTERM)
        name = _NAMES[signal.Signals(self._signal)]
        return Stopped(f"stopped by {name} {rest}", 128 + self._signal)

    @contextlib.contextmanager
    def interruptible(self, rest: str) -> Iterator[None]:
        """Work that can be broken off anywhere: a request, old or new, raises Stopped."""
        self._at_once = rest
        try:
            if self.asked:
                raise self.stopped(rest)
            yield
        finally:
            self._at_once = None

    def note(self, number: int, _: FrameType | None) -> None:
        """The signal handler."""
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C means now
        # Of several, the first is told: after Ctrl-C a sweep sends SIGTERM, too.
        self._signal = self._signal or number
        if self._at_once is not None:
            raise self.stopped(self._at_once)


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Listen as long as this lasts. Off the main thread, which alone may, nobody ever asks."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    # Started with nohup, a run stays when the terminal goes.
    heard = [n for n in _NAMES if (n, signal.getsignal(n)) != (signal.SIGHUP, signal.SIG_IGN)]
    before = {number: signal.signal(number, request.note) for number in heard}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
