"""How much memory there is, and what would fit where something does not.

Large allocations are checked before they are made: the error of a failed one names no number, and
on a CPU the system may end the process instead.
"""

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from gaugelasso.errors import UserError, out_of_memory

# What needs less is not checked: reading the free memory costs more than it is worth.
_SMALL = 2**26
_TRIED = re.compile(r"allocate ([\d.]+) (bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def memory_bytes() -> int:
    """The memory of this machine, or what a limit of this process (ulimit -v) leaves of it."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return machine if limit == resource.RLIM_INFINITY else min(machine, limit)


def free_bytes(device: str | torch.device) -> int:
    """The bytes that can be allocated on a device now."""
    if torch.device(device).type == "cuda":
        # What torch keeps for later tensors is free too.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        rows = Path("/proc/meminfo").read_text().splitlines()
        found = dict(row.split(":", 1) for row in rows)
        free = min(memory_bytes(), 1024 * int(found["MemAvailable"].split()[0]))
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:  # what the process has already counts too
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            free = max(0, min(free, limit - pages * os.sysconf("SC_PAGE_SIZE")))
        return free
    except (OSError, KeyError, ValueError):  # not Linux: all that the machine has
        return memory_bytes()


def check_fits(each: int, batch: int, what: str, device: str | torch.device) -> None:
    """UserError unless `batch` sequences of `each` bytes fit into the free memory of a device."""
    if each * batch < _SMALL or each * batch <= (free := free_bytes(device)):
        return
    fits = free // each
    remedy = f"at most {fits:,} could fit" if fits else "not one fits: give shorter ones"
    raise UserError(
        f"{what} of {batch:,} sequences needs {each * batch / 1e9:.3g} GB, and {free / 1e9:.3g} GB "
        f"of {torch.device(device).type} memory are free; {remedy}"
    )


@contextlib.contextmanager
def says_what_fits(batch: int, device: str | torch.device) -> Iterator[None]:
    """A lack of memory inside becomes a UserError that names a batch to try instead.

    The need is that of the tensors that were made inside and of the one that failed. It is a lower
    bound, so at most half of the batch is named.
    """
    gpu = torch.device(device).type == "cuda"
    free, before = free_bytes(device), torch.cuda.memory_allocated(device) if gpu else 0
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        message = out_of_memory(error)
        if not message:
            raise
        made = torch.cuda.memory_allocated(device) - before if gpu else 0
        tried = _TRIED.search(str(error))
        needed = made + (float(tried[1]) * _UNITS[tried[2]] if tried else 0)
        fits = min(batch // 2, int(batch * free / needed) if needed else batch)
        remedy = f"try {fits:,}" if fits else "give shorter sequences"
        raise UserError(
            f"{message.partition(':')[0]}: a batch of {batch:,} does not fit into "
            f"{free / 1e9:.3g} GB of free {torch.device(device).type} memory; {remedy}"
        ) from None
