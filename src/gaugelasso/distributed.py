"""Ranks: the processes of one run, and the collectives between them.

A `Team` of one is the default and costs nothing. `join` returns a team of several where torchrun,
or another launcher that sets its variables, started this process. Ranks use gloo between CPUs and
NCCL between GPUs. Small values are sent as JSON, never as pickle. Knows torch.distributed, and
nothing of models or training.
"""

import contextlib
import datetime
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from gaugelasso.errors import UserError

# How long ranks wait for each other to start: some read their libraries from slower disks.
_ARRIVAL = datetime.timedelta(minutes=5)
# How long the others wait while one rank works alone (saves, evaluates). A rank that dies is
# noticed at once; this bounds the wait for one that hangs.
_PATIENCE = datetime.timedelta(hours=1)
# A roll call ends when no further rank has answered for so long. Slow machines need time.
_ROLL_CALL_S = 3.0

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RankLost(UserError):
    """Another rank has exited, or does not answer."""


class RanksDiffer(UserError):
    """Ranks that must hold the same state do not."""


class Team:
    """Rank 0 of 1: every collective is local.

    A team also carries one stop flag. Any rank may raise it with `request_stop`; the exchange of
    the next training step, which averages `stop_flag` over the ranks, brings it to all of them.
    """

    rank, size = 0, 1
    local: int | None = None  # the number among this machine's ranks

    @property
    def stop_requested(self) -> bool:
        """Whether any rank had requested a stop before the last exchange. Waits for the device."""
        return False

    def request_stop(self) -> None:
        """Request a stop of all ranks. A team of one has no other rank to notify."""

    def clear_stop(self) -> None:
        """Lower the flag: a run that begins is not stopped by a request to the one before."""

    def stop_flag(self, device: torch.device) -> Tensor:
        """The flag as a scalar on `device`, for the step's exchange: above 0 once it is raised."""
        return torch.zeros((), device=device)

    def mean_(self, tensor: Tensor) -> None:
        """Mean over all ranks, in place; the same bits on every rank."""

    def sum_(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place; the same bits on every rank."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor, concatenated along the first dim."""
        return tensor

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value (JSON-ready) on every rank."""
        return value

    def on_rank0(self, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0 alone; every rank gets its result, or the UserError that it raised.

        The other ranks wait until it is done.
        """
        return work()

    def check_same(self, digest: str, when: str) -> None:
        """RanksDiffer, on every rank, unless all digests are equal; its message names `when`."""

    def close(self) -> None:
        """Leave the process group. Not for a team that lost a rank."""


ALONE = Team()


def started_as() -> tuple[int, int]:
    """This process's rank and the number of ranks, from the variables that torchrun sets."""
    rank, size = _variable("RANK", 0), _variable("WORLD_SIZE", 1)
    if rank >= size:
        raise UserError(f"RANK={rank} in the environment: must be below WORLD_SIZE={size}")
    return rank, size


def _variable(name: str, otherwise: int) -> int:
    text = os.environ.get(name, str(otherwise))
    if not text.isdecimal():
        raise UserError(f"{name}={text!r} in the environment: must be a whole number")
    return int(text)


def join(gpu: bool, timeout_s: float) -> Team:
    """The team that this process was started in."""
    if started_as()[1] <= 1:
        return ALONE
    return Ranks(gpu, timeout_s)


class Ranks(Team):
    """One of several processes. A failed collective raises RankLost, naming the lost ranks."""

    def __init__(self, gpu: bool, timeout_s: float):
        self.rank, self.size = started_as()
        self.local = _variable("LOCAL_RANK", self.rank)
        self._stop = torch.zeros(())
        timeout = datetime.timedelta(seconds=timeout_s)
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        try:
            store, _, _ = next(rendezvous("env://", timeout=_ARRIVAL))
            # torchrun keeps its store when it restarts the ranks; old keys must not be read again.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            prefix = f"attempt-{attempt}"
            self._store = dist.PrefixStore(prefix, store)
            # A connection serves one call at a time, so the thread that waits needs its own.
            second = dist.PrefixStore(prefix, store.clone())
            self._store.set(f"came/{self.rank}", "")
            self._store.wait([f"came/{rank}" for rank in range(self.size)], _ARRIVAL)
            dist.init_process_group(
                backend,
                timeout=timeout,
                world_size=self.size,
                rank=self.rank,
                store=dist.PrefixStore("group", self._store),
            )
            self._patient = dist.new_group(timeout=_PATIENCE, backend="gloo")
        except (RuntimeError, ValueError) as error:
            raise RankLost(
                f"the other {self.size - 1} ranks cannot be reached ({_reason(error)})"
            ) from None
        threading.Thread(target=_answer, args=(second, self.rank), daemon=True).start()

    @property
    def stop_requested(self) -> bool:
        return bool(self._stop)

    def request_stop(self) -> None:
        self._stop.fill_(1.0)

    def clear_stop(self) -> None:
        self._stop.zero_()

    def stop_flag(self, device: torch.device) -> Tensor:
        if self._stop.device != device:
            self._stop = self._stop.to(device)
        return self._stop

    def mean_(self, tensor: Tensor) -> None:
        self.sum_(tensor)
        tensor.div_(self.size)

    def sum_(self, tensor: Tensor) -> None:
        with self._collective():
            dist.all_reduce(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        every = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        with self._collective():
            dist.all_gather(list(every.chunk(self.size)), tensor.contiguous())
        return every

    def broadcast(self, value: Any) -> Any:
        message = json.dumps(value).encode() if self.rank == 0 else b""
        length = torch.tensor(len(message))
        with self._collective():
            dist.broadcast(length, 0, self._patient)
            text = torch.frombuffer(bytearray(message or bytes(int(length))), dtype=torch.uint8)
            dist.broadcast(text, 0, self._patient)
        return json.loads(text.numpy().tobytes())

    def on_rank0(self, work: Callable[[], Any]) -> Any:
        if self.rank:
            result = self.broadcast(None)
            if "error" in result:
                raise UserError(result["error"])
            return result["value"]
        try:
            value = work()
        except UserError as error:
            self.broadcast({"error": str(error)})
            raise
        self.broadcast({"value": value})
        return value

    def check_same(self, digest: str, when: str) -> None:
        own = torch.frombuffer(bytearray(_sha256(digest)), dtype=torch.uint8)
        every = self.gather(own).view(self.size, -1)
        differing = [rank for rank in range(self.size) if not torch.equal(every[rank], every[0])]
        if differing:
            raise RanksDiffer(
                f"{_ranks_are(differing)} not in the state of rank 0 {when}: all ranks exit. "
                "Ranks must run the same code on the same kind of hardware; go on with --resume"
            )

    def close(self) -> None:
        dist.destroy_process_group()

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        """Turn a collective's failure into RankLost with the ranks that are gone."""
        try:
            yield
        except RuntimeError as error:
            message = f"{self._roll_call()} ({_reason(error)}); go on with --resume"
            raise RankLost(message) from None

    def _roll_call(self) -> str:
        """Names the ranks that do not answer; all ranks use the result of the first caller."""
        try:
            if not self._store.check(["gone"]):
                self._store.set("call", "")
                silent, until = list(range(self.size)), time.monotonic() + _ROLL_CALL_S
                while silent and time.monotonic() < until:
                    time.sleep(0.05)
                    left = [rank for rank in silent if not self._store.check([f"here/{rank}"])]
                    if left != silent:
                        silent, until = left, time.monotonic() + _ROLL_CALL_S
                self._store.compare_set("gone", "", json.dumps(silent))
            gone = json.loads(self._store.get("gone"))
        except RuntimeError:  # the store was on rank 0, which has exited
            return "another rank is gone"
        return f"{_ranks_are(gone)} gone" if gone else "the connection to another rank is gone"


def _answer(store: dist.Store, rank: int) -> None:
    """In a thread: answer the roll call, even while this rank waits in a collective."""
    with contextlib.suppress(RuntimeError):  # the store ends with the run
        store.wait(["call"], datetime.timedelta(days=10_000))
        store.set(f"here/{rank}", "")


def _ranks_are(ranks: list[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers} is" if len(ranks) == 1 else f"ranks {numbers} are"


def _reason(error: Exception) -> str:
    """The first sentence of an error, without its position in the library's source."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error)).split(". ")[0].split("\n")[0][:200]


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def fingerprint(tensors: Mapping[str, Tensor], *more: Any) -> str:
    """A digest of the tensors' names, shapes and bits, and of further JSON-ready values.

    The bits of each tensor are summed on its device, each element times its own odd number, modulo
    2**64. Any change of one element changes the sum, and only the sums move to the host.
    """
    sums = torch.stack([_bit_sum(tensor.detach()) for tensor in tensors.values()]).tolist()
    rows = [(name, list(tensors[name].shape), s) for name, s in zip(tensors, sums, strict=True)]
    return hashlib.sha256(json.dumps([sorted(rows), more]).encode()).hexdigest()


def _bit_sum(tensor: Tensor) -> Tensor:
    bits = tensor.reshape(-1).view(_BITS[tensor.element_size()]).long()
    return (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()
