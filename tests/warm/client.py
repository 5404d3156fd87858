"""Has a command run by the server, and stands for its process: passes signals on, exits as it does.

Imports little, because its start is what makes a process cheap or not.
"""

import os
import signal
import socket
import sys
from array import array

FORWARDED = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTERM", "SIGCONT", "SIGABRT")


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# The controller of a job is known by its own number, and it does not import torch.
if sys.argv[1:3] == ["-m", "submitit.local._local"]:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
# First of all: the socket could take the number of a closed stream.
streams = [each for each in range(3) if is_open(each)]
spare = [os.open(os.devnull, os.O_RDWR) for _ in range(3 - len(streams))]
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.connect(os.path.join(os.path.dirname(sys.argv[0]), "socket"))
numbers = [getattr(signal, name) for name in FORWARDED]
ignored = [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]
request = repr(
    {
        "client": os.getpid(),
        "words": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "streams": streams,
        "ignored": list(map(int, ignored)),
        "mask": os.umask(0),
    }
).encode()
header = len(request).to_bytes(8, "little")
fds = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", streams or spare[:1]))
connection.sendmsg([header], [fds])
connection.sendall(request)
assert connection.recv(1) == b"+"  # the process exists
for number in numbers:
    if number not in ignored:
        signal.signal(number, lambda each, _: connection.send(bytes([each])))
status = connection.recv(4)
if len(status) != 4:  # the server is gone
    os.kill(os.getpid(), signal.SIGKILL)
code = int.from_bytes(status, "little", signed=True)
if code < 0:
    if -code in numbers:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
