"""Ranks: the processes of one run, and what they have to say to each other.

A `Team` of one is the rule and costs nothing. `join` makes one of several where torchrun (or
whoever sets its variables) started this process: gloo between hosts' memories, NCCL between
GPUs. Small things travel as JSON, never as pickle. Knows torch.distributed, and nothing of
models or training.
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

# Processes do not start at the same moment: some read their libraries from slower disks.
_ARRIVAL = datetime.timedelta(minutes=5)
# While one rank works alone (saves, evaluates) the others wait this long: a rank that dies is
# noticed at once, so this is for one that hangs.
_PATIENCE = datetime.timedelta(hours=1)
# A rank that lost another hears who is still there until nobody new has answered for so long:
# machines may be slow just then.
_ROLL_CALL_S = 3.0

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RankLost(UserError):
    """Another rank is gone, or does not answer."""


class RanksDiffer(UserError):
    """Ranks that must hold the same do not."""


class Team:
    """Rank 0 of 1: whatever is asked for is at hand."""

    rank, size = 0, 1
    local: int | None = None  # the number among this machine's ranks

    def mean_(self, tensor: Tensor) -> None:
        """The mean over all ranks, in place; the same bits everywhere."""

    def sum_(self, tensor: Tensor) -> None:
        """The sum over all ranks, in place; the same bits everywhere."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor, one after another along the first dim."""
        return tensor

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value (JSON-ready) on every rank."""
        return value

    def on_rank0(self, work: Callable[[], Any]) -> Any:
        """What `work`, done by rank 0 alone, returned; or the UserError that it raised.

        However long it takes, the others wait.
        """
        return work()

    def check_same(self, digest: str, when: str) -> None:
        """RanksDiffer, on every rank, unless all come with the same digest."""

    def close(self) -> None:
        """Part in peace; not for a team that lost somebody."""


ALONE = Team()


def started_as() -> tuple[int, int]:
    """This process's rank and their number, by the variables that torchrun sets."""
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
    """One of several processes. An exchange that fails raises RankLost and names who is gone."""

    def __init__(self, gpu: bool, timeout_s: float):
        self.rank, self.size = started_as()
        self.local = _variable("LOCAL_RANK", self.rank)
        timeout = datetime.timedelta(seconds=timeout_s)
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        try:
            store, _, _ = next(rendezvous("env://", timeout=_ARRIVAL))
            # torchrun keeps its store when it starts the ranks again: old words are not for them.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            prefix = f"attempt-{attempt}"
            self._store = dist.PrefixStore(prefix, store)
            # A connection serves one question at a time, and this one is about to wait.
            beside = dist.PrefixStore(prefix, store.clone())
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
        threading.Thread(target=_answer, args=(beside, self.rank), daemon=True).start()

    def mean_(self, tensor: Tensor) -> None:
        self.sum_(tensor)
        tensor.div_(self.size)

    def sum_(self, tensor: Tensor) -> None:
        with self._together():
            dist.all_reduce(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        every = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        with self._together():
            dist.all_gather(list(every.chunk(self.size)), tensor.contiguous())
        return every

    def broadcast(self, value: Any) -> Any:
        said = json.dumps(value).encode() if self.rank == 0 else b""
        length = torch.tensor(len(said))
        with self._together():
            dist.broadcast(length, 0, self._patient)
            text = torch.frombuffer(bytearray(said or bytes(int(length))), dtype=torch.uint8)
            dist.broadcast(text, 0, self._patient)
        return json.loads(text.numpy().tobytes())

    def on_rank0(self, work: Callable[[], Any]) -> Any:
        if self.rank:
            said = self.broadcast(None)
            if "error" in said:
                raise UserError(said["error"])
            return said["value"]
        try:
            value = work()
        except UserError as error:
            self.broadcast({"error": str(error)})
            raise
        self.broadcast({"value": value})
        return value

    def check_same(self, digest: str, when: str) -> None:
        mine = torch.frombuffer(bytearray(_sha256(digest)), dtype=torch.uint8)
        every = self.gather(mine).view(self.size, -1)
        odd = [rank for rank in range(self.size) if not torch.equal(every[rank], every[0])]
        if odd:
            raise RanksDiffer(
                f"{_ranks_are(odd)} not in the state of rank 0 {when}: all leave at once. "
                "Ranks must run the same code on the same kind of hardware; go on with --resume"
            )

    def close(self) -> None:
        dist.destroy_process_group()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            said = f"{self._roll_call()} ({_reason(error)}); go on with --resume"
            raise RankLost(said) from None

    def _roll_call(self) -> str:
        """Who is gone, in words: whoever does not answer. All that ask get the first's result."""
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
        except RuntimeError:  # rank 0 kept the store, and is gone or has left
            return "another rank is gone"
        return f"{_ranks_are(gone)} gone" if gone else "the way to another rank is gone"


def _answer(store: dist.Store, rank: int) -> None:
    """In a thread: answer the roll call, even while an exchange keeps this rank waiting."""
    with contextlib.suppress(RuntimeError):  # the store goes when the run does
        store.wait(["call"], datetime.timedelta(days=10_000))
        store.set(f"here/{rank}", "")


def _ranks_are(ranks: list[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers} is" if len(ranks) == 1 else f"ranks {numbers} are"


def _reason(error: Exception) -> str:
    """The first sentence, without the place in the library's own source."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error)).split(". ")[0].split("\n")[0][:200]


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def fingerprint(tensors: Mapping[str, Tensor], *more: Any) -> str:
    """A digest of the tensors' names, shapes and bits, and of whatever else is JSON-ready.

    Bits are summed where they lie, each element's times an odd number of its own, modulo
    2**64: whatever happens to one element shows, and little is moved to the host.
    """
    sums = torch.stack([_bit_sum(tensor.detach()) for tensor in tensors.values()]).tolist()
    rows = [(name, list(tensors[name].shape), s) for name, s in zip(tensors, sums, strict=True)]
    return hashlib.sha256(json.dumps([sorted(rows), more]).encode()).hexdigest()


def _bit_sum(tensor: Tensor) -> Tensor:
    bits = tensor.reshape(-1).view(_BITS[tensor.element_size()]).long()
    return (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()
