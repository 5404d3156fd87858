"""Drives Debian's chromium without a window, by the DevTools protocol over a pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_TIMEOUT_S = 60.0


class Browser:
    """One tab. `problems` holds what the console printed, and exceptions."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers = commands, answers
        self._buffer, self._number, self._session = b"", 0, ""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Send one command and wait for its answer; events in between are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def open(self, path: Path, width: int = 1100, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until it has run its script."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=width < 600,
            deviceScaleFactor=1,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.absolute().as_uri())
        end = time.monotonic() + _TIMEOUT_S
        while self.value("location.href + document.readyState") != (
            f"{path.absolute().as_uri()}complete"
        ):
            assert time.monotonic() < end, "the page does not load"

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, x: float, y: float, button: str = "left") -> None:
        """Press and release the mouse at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button,
                      buttons=1 if button == "left" else 2, clickCount=1)  # fmt: skip

    def tap(self, x: float, y: float) -> None:
        """Put a finger on a place of the window, and lift it."""
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def key(self, name: str, code: int) -> None:
        """Press and release a key that types no text."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code)

    def hover(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def box(self, selector: str) -> dict[str, float]:
        """The place of an element, scrolled into the window."""
        self.value(f"document.querySelector({json.dumps(selector)}).scrollIntoView()")
        self.value("scrollBy(0, -innerHeight / 2)")
        self.next_frame()  # with the event of scrolling
        found = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        return dict(self.value(f"{found}.toJSON()"))

    def next_frame(self) -> None:
        """Wait until the next frame is drawn."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)}).textContent"))

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._answers], [], [], _TIMEOUT_S)[0], "chromium hangs"
            part = os.read(self._answers, 1 << 16)
            assert part, "chromium ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") in (
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Log.entryAdded",
        ):
            self.problems.append(json.dumps(event["params"])[:2000])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile folder; ended at the end."""
    assert CHROMIUM, (
        "chromium is not installed: apt install chromium, or unset GAUGELASSO_BROWSER to skip the "
        "tests of the page"
    )
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    # Chromium reads commands from descriptor 3 and answers on descriptor 4. The pipes may have
    # these numbers here, so both are moved away first.
    program = (
        f"import fcntl, os, sys; pipes = {read_commands}, {write_answers}\n"
        "pipes = [fcntl.fcntl(pipe, fcntl.F_DUPFD, 10) for pipe in pipes]\n"
        "os.dup2(pipes[0], 3), os.dup2(pipes[1], 4)\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    arguments = [
        sys.executable, "-I", "-S", "-c", program, CHROMIUM, "--headless",
        "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--hide-scrollbars", f"--user-data-dir={profile}",
    ]  # fmt: skip
    process = subprocess.Popen(
        arguments, pass_fds=(read_commands, write_answers), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)
        os.close(answers)
        process.terminate()
        process.wait(_TIMEOUT_S)
