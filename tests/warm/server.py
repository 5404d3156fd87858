"""Forks processes that have torch and the package imported, and reports how they end.

The fork returns to the top level of this module, so that a process ends as one that the interpreter
has started: uncaught errors, buffered output and exit codes are Python's own.
"""

import ast
import atexit
import contextlib
import fcntl
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import threading
from array import array
from pathlib import Path
from types import ModuleType
from typing import Any

import submitit.core.submission
import submitit.local.local  # noqa: F401
import torch
import torch.distributed.launcher.api

import gaugelasso.cli
import gaugelasso.report.arms
import gaugelasso.report.heatmap
import gaugelasso.report.page
import gaugelasso.report.profile
import gaugelasso.report.training  # noqa: F401
import tests.distributed.crews  # what tests call in a process of its own
import tests.trust.children
import tests.warm.preload  # noqa: F401

Request = dict[str, Any]


def receive(connection: socket.socket) -> Request | None:
    """The request of a client, with the descriptors of its streams; None if it is gone."""
    size = array("i").itemsize
    header, extra, *_ = connection.recvmsg(8, socket.CMSG_SPACE(3 * size))
    if len(header) < 8:
        return None
    descriptors = array("i")
    for _, _, data in extra:
        descriptors.frombytes(data[: len(data) - len(data) % size])
    text = b""
    while len(text) < int.from_bytes(header, "little"):
        part = connection.recv(1 << 20)
        if not part:
            return None
        text += part
    return ast.literal_eval(text.decode()) | {"descriptors": list(descriptors)}


def serve(listener: socket.socket, folder: Path) -> Request:
    """Serve until standard input ends, then exit. Returns in each forked process."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, None)
    selector.register(0, selectors.EVENT_READ, None)
    alive: dict[int, socket.socket] = {}  # by process

    def end(pid: int, exit_fd: int) -> None:
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        selector.unregister(exit_fd)
        os.close(exit_fd)
        connection = alive.pop(pid)
        with contextlib.suppress(OSError):
            connection.send(code.to_bytes(4, "little", signed=True))
        with contextlib.suppress(KeyError):
            selector.unregister(connection)
        connection.close()

    def hear(connection: socket.socket, pid: int) -> None:
        """Signals of a client; its end, if it was killed."""
        with contextlib.suppress(ConnectionError):
            if numbers := connection.recv(64):
                for number in numbers:
                    os.kill(pid, number)
                return
        selector.unregister(connection)
        os.kill(pid, signal.SIGKILL)

    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
                shutil.rmtree(folder)
                os._exit(0)
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request = receive(connection)
                if request is None:
                    connection.close()
                    continue
                pid = os.fork()
                if not pid:
                    for each in (selector, listener, connection, *alive.values()):
                        each.close()
                    return request
                (folder / f"{request['client']}.worker").write_text(str(pid))
                for descriptor in request["descriptors"]:
                    os.close(descriptor)
                exit_fd = os.pidfd_open(pid)
                alive[pid] = connection
                selector.register(exit_fd, selectors.EVENT_READ, pid)
                selector.register(connection, selectors.EVENT_READ, pid)
                with contextlib.suppress(OSError):
                    connection.send(b"+")
            elif isinstance(key.fileobj, int):
                if key.data in alive:
                    end(key.data, key.fileobj)
            elif key.data in alive:
                hear(key.fileobj, key.data)


def become(request: Request, program: str) -> None:
    """Take over the streams, the environment and the folder of the client."""
    streams, descriptors = request["streams"], request["descriptors"]
    if not streams:
        os.close(descriptors.pop())
    # Move them out of the way first: one may have the number of another's place.
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in descriptors]
    for number in range(3):
        with contextlib.suppress(OSError):
            os.close(number)
    for number, descriptor in zip(streams, moved, strict=True):
        os.dup2(descriptor, number)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["mask"])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    sys.executable = program
    unbuffered = "-u" in request["words"][:1]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = None
        if number in streams:
            stream = open(  # noqa: SIM115
                number, "r" if number == 0 else "w", encoding="utf-8", closefd=False,
                errors="backslashreplace" if number == 2 else "strict",
                buffering=1 if number == 2 or os.isatty(number) else -1,
            )  # fmt: skip
            if number and unbuffered:
                stream.reconfigure(write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))


def run(words: list[str]) -> None:
    """What `python WORDS` does."""
    words = words[1:] if words[0] == "-u" else words
    kind, what, *arguments = words
    sys.path[0] = os.getcwd() if kind == "-m" else ""
    if kind == "-m":
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(what, sys.modules["__main__"].__dict__)
    else:
        raise SystemExit(f"not served: {words}")


def leave_fast(code: object) -> None:
    """Exit without taking torch apart, which takes longer than most commands.

    Returns where Python's own way out would do more than that.
    """
    if isinstance(code, int | None) and threading.active_count() == 1:
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    torch.set_num_threads(1)
    address, program = sys.argv[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        request = serve(listener, Path(address).parent)
    become(request, program)
    code: object = None
    try:
        run(request["words"])
    except SystemExit as stopped:
        code = stopped.code
    leave_fast(code)
    sys.exit(code)  # type: ignore[arg-type]
